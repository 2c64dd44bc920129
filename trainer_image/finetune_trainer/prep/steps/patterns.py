"""Patterns of personal data and secrets in texts.

They are made for precision: a number counts only if its form or a word before it shows that it is a phone or card number. A string
counts as a secret only if the mark of a service, a word before it or its place in a URL shows this.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import phonenumbers
import re2

from finetune_trainer.prep.steps import secret_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from finetune_crds.cleaning import RedactKind
    from finetune_trainer.prep.steps.secret_rules import Span


class Pattern(NamedTuple):
    """The pattern of one kind of value.

    hint: an expression of RE2; a text without a match has no value of this kind.
    find: returns the positions of the values in a text.
    """

    placeholder: str
    hint: str
    find: Callable[[str], Iterable[Span]]


# Letters of scripts with spaces between words; diacritics are part of a letter, or separate characters (RFC 6531).
_LETTER = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u0370-\u052f\u1e00-\u1fff"
_EMAIL = re.compile(
    rf"(?<![{_LETTER}0-9._%+-])(?P<account>[{_LETTER}0-9][{_LETTER}0-9._%+-]{{0,63}})@"
    # Not the name of an image at twice its size, such as logo@2x.png.
    r"(?![1-9]x\.)"
    rf"(?:[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,61}}[{_LETTER}0-9])?\.){{1,8}}[{_LETTER}]{{2,24}}"
    # Not a call after a product of matrices (a@b.sum()), nor a path after the account of a server (git@host.com:team/code).
    rf"(?![{_LETTER}0-9_(-]|\.[{_LETTER}0-9]|:[\w.~-]{{0,255}}/)"
)
# Accounts that all users of a code server share.
_ACCOUNTS_OF_SERVERS = frozenset({"git", "hg", "svn"})
# Commands that name a server and its account in front of a file or a repository: scp model.bin root@host.com:model.bin.
_COPY_COMMAND = re.compile(r"\b(?:scp|sftp|rsync|git clone)\b[^\n]*\Z")
# How much text before an address is searched for a command.
_MAX_COMMAND_CHARS = 200
# The beginning of a URL with a login, up to a place in its password.
_ACCOUNT_OF_URL = re.compile(r"://[^\s/:@]*:[^\s/:@]*\Z")
_MAX_ACCOUNT_CHARS = 100
# The password in a list of stolen logins: an address and a password fill a whole line or field.
_PASSWORD_OF_EMAIL = re.compile(
    r"(?m)(?:^[ ]{0,20}|[,;\t]|\|[ ]{0,20})"
    rf"(?!(?:git|hg|svn)@)[{_LETTER}0-9._%+-]{{1,64}}@(?:[{_LETTER}0-9-]{{1,63}}\.){{1,8}}[{_LETTER}]{{2,24}}:"
    # Letters with a digit or a sign. Hyphens and underscores do not count: names of files and repositories have them too.
    r"(?P<value>(?=[^\s/:@,;|]{0,63}[A-Za-z])(?=[^\s/:@,;|]{0,63}[0-9!#$%^&*?+=])"
    # Not a file that a command copies, such as user@host.com:model2.bin.
    r"(?![^\s/:@,;|]{1,63}\.[A-Za-z][A-Za-z0-9]{0,11}(?![^\s,;|]))"
    r"[^\s/:@,;|]{6,64})(?=[,;\t]|[ ]{0,20}(?:\||\r?$))"
)

_LABEL = "(?:tel|telephone|phone|mobile|cell|fax|telefon|handy|mobil|t\u00e9l\u00e9phone|t\u00e9l|tel\u00e9fono|telefono|whatsapp)"
# What must not follow a number: a letter, a digit, or a sign and a digit.
_ENDS = r"(?!\w|[.,:/-]\d)"
# Seven digits or more, with only separators of phone numbers between them.
_NUMBER = re.compile(r"(?:\+|\(\+?|(?<![\w+.,/-]))[0-9](?:[ \u00a0.()/\u2010-\u2013-]{0,3}[0-9]){6,18}")
# Numbers without the code of a country: in the form of North America, or after a word that says what they are.
_GROUPED = re.compile(
    r"\(?[2-9][0-9]{2}(?:\)[ \u00a0]?|[-./\u2010-\u2013])[2-9][0-9]{2}[ \u00a0.\u2010-\u2013-]?[0-9]{4}"
)
_ANNOUNCED = re.compile(rf"(?i:\b{_LABEL})\b\.?(?: (?:no|number|nr|nummer)\b\.?)?[:= ]{{1,3}}\Z")
_ANNOUNCED_FROM_ZERO = re.compile(
    rf"(?i:\b{_LABEL})\b\.?(?: (?:no|number|nr|nummer)\b\.?)?[:= ]{{1,3}}"
    rf"(?P<value>\(?0\d?(?:[ ./-]{{0,3}}\(?\d\)?){{5,13}}){_ENDS}"
)
_AFTER_PHONE = re.compile(_ENDS)
_MAX_LABEL_CHARS = 40

# The number ranges of card networks, with the lengths of their numbers.
_CARD_NETWORKS = re.compile(
    r"4\d{15}(?:\d{3})?"  # Visa
    r"|(?:5[1-5]\d{2}|222[1-9]|22[3-9]\d|2[3-6]\d{2}|27[01]\d|2720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|(?:6011|64[4-9]\d|65\d{2})\d{12}(?:\d{3})?"  # Discover
    r"|35(?:2[89]|[3-8]\d)\d{12}"  # JCB
    r"|3(?:0[0-5]|[68]\d)\d{11}"  # Diners Club
    r"|62\d{14}(?:\d{3})?"  # UnionPay
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{12}(?:\d{3})?"  # Maestro
)
# A card number in one piece, or in groups as on the card.
_CARD_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d[ :/+-])(?<![+=]-)"
    r"(?:\d{14,16}|\d{19}|\d{4}(?P<gap>[ -])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{4}(?:(?P=gap)\d{3})?|\d{6}(?P=gap)\d{4,5}))"
    # A date of expiry may follow, and no more groups of digits.
    r"(?!\w|[.:/-]\d| \d{3})"
)

# An expression of RE2 that matches a mark of every secret that the expressions below find; it is faster than they are.
_MARKS = (
    r"PRIVATE KEY|(AKIA|ASIA)[A-Z2-7]{16}|(?i:secret_?access_?key|session_?token)|\bsk-[\w-]{20}|\b[sr]k_(live|test)_"
    r"|\bgh[pousr]_\w{36}|\bgithub_pat_|\bglpat-|\bxox[a-z]-|\bAIza[\w-]{35}|\bhf_\w{34}|\bdapi[0-9a-f]{32}|\bnpm_\w{36}"
    r"|\beyJ[\w-]{8}|(Account|SharedAccess)Key=|[?&]sig=|://[^\s/@]{0,64}:[^\s/@]{1,128}@|@[^\s@:]{1,255}\.[^\s@:.]{2,24}:[^\s/:@]{6}"
    r"|\bGOCSPX-|\bya29\.|\b1//0|\bSG\.|\bhv[bs]\.|\bpypi-"
)
_HAS_MARK = re2.compile(_MARKS)
# Each secret with the minimum length that its service gives it.
_SECRET = re.compile(
    # A private key in PEM or of OpenPGP: the whole block, or its first line.
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[\sA-Za-z0-9+/=:,.()\\-]{0,20000}?-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
    r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])"
    r"|(?<![\w-])sk-[A-Za-z0-9_-]{20,200}"
    r"|(?<!\w)[sr]k_(?:live|test)_[A-Za-z0-9]{16,200}"
    r"|(?<!\w)gh[pousr]_[A-Za-z0-9]{36,255}(?!\w)"
    r"|(?<!\w)github_pat_[A-Za-z0-9_]{22,255}"
    r"|(?<!\w)glpat-[A-Za-z0-9_-]{20,64}"
    r"|(?<!\w)xox[abeoprs]-[A-Za-z0-9-]{20,250}"
    r"|(?<!\w)AIza[A-Za-z0-9_-]{35}(?![\w-])"
    r"|(?<!\w)hf_[A-Za-z0-9]{34,40}(?!\w)"
    r"|(?<!\w)dapi[0-9a-f]{32}(?:-\d)?(?!\w)"
    r"|(?<!\w)npm_[A-Za-z0-9]{36}(?!\w)"
    # Google OAuth: a client secret, an access token, and a refresh token.
    r"|(?<![\w-])GOCSPX-[A-Za-z0-9_-]{20,40}|(?<![\w.])ya29\.[A-Za-z0-9_-]{20,1000}|(?<![\w/])1//0[A-Za-z0-9_-]{40,150}"
    # SendGrid, HashiCorp Vault, and PyPI.
    r"|(?<!\w)SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}|(?<!\w)hv[bs]\.[A-Za-z0-9_-]{20,300}"
    r"|(?<![\w-])pypi-[A-Za-z0-9_-]{50,1000}"
    # A JSON web token: two objects of JSON, and a signature.
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{8,5000}\.eyJ[A-Za-z0-9_-]{8,5000}\.[A-Za-z0-9_-]{0,2000}"
)
# Secrets that are recognizable by a word before them.
_ASSIGNED = (
    # AWS, in a file of settings, as a variable, and in the JSON of its command line, which may itself be in a string of JSON.
    re.compile(
        r"(?i:secret_?access_?key)\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
    ),
    re.compile(
        r"(?i:session_?token)\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"']?(?P<value>[A-Za-z0-9/+]{100,2000}={0,2})(?![A-Za-z0-9/+=])"
    ),
    # A connection string of Azure, and a shared access signature.
    re.compile(r"(?:Account|SharedAccess)Key=(?P<value>[A-Za-z0-9+/]{40,90}={0,2})"),
    re.compile(r"[?&]sig=(?P<value>[A-Za-z0-9%+/]{42,70}(?:%3[Dd]|=))"),
    _PASSWORD_OF_EMAIL,
)
_PASSWORD_OF_URL = re.compile(
    r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@\"'<>]{0,64}:(?P<value>[^\s/@\"'<>]{1,128})@"
)
# Placeholders for passwords, and names of variables.
_NO_PASSWORD = re.compile(
    r"(?i:(?:your|my|db|the)?[_-]?(?:password|passwd|passwort|pass|pwd|pw|secret|token|key|user|changeme|x+|\*+|\.+|\u2026))|[$%{\[(*].*"
)
# Names of CSS classes, which may begin with sk-, as keys of OpenAI do.
_CLASS_NAME = re.compile(r"sk-[a-z_-]+[0-9]{0,4}(?:[_-][a-z]+|[_-][0-9]{1,4})*")


def _find_emails(text: str) -> Iterator[Span]:
    for match in _EMAIL.finditer(text):
        # NB: in https://user:password@host.com, the password and the host look like an address.
        before = max(0, match.start() - _MAX_ACCOUNT_CHARS)
        if not _is_account_of_server(text, match) and not _ACCOUNT_OF_URL.search(text, before, match.start()):
            yield match.span()


def _is_account_of_server(text: str, address: re.Match[str]) -> bool:
    """Return whether an address names a repository or a file, for example `git@host.com:code`."""
    before = max(0, address.start() - _MAX_COMMAND_CHARS)
    return text[address.end() : address.end() + 1] == ":" and (
        address["account"] in _ACCOUNTS_OF_SERVERS
        or _COPY_COMMAND.search(text, before, address.start()) is not None
    )


def _find_phones(text: str) -> Iterator[Span]:
    """Yield phone numbers: numbers from 0 after a word such as tel, and valid numbers of a country after such a word or in a known form."""
    for match in _ANNOUNCED_FROM_ZERO.finditer(text):
        # From seven digits, as in `_NUMBER`, to the 15 of the longest numbers (ITU-T E.164).
        if 7 <= sum(character.isdigit() for character in match["value"]) <= 15:
            yield match.span("value")
    for candidate in _NUMBER.finditer(text):
        begin = candidate.start()
        is_announced = bool(_ANNOUNCED.search(text, max(0, begin - _MAX_LABEL_CHARS), begin))
        if not (is_announced or "+" in candidate[0] or _GROUPED.search(candidate[0])):
            continue
        # NB: numbers without the code of a country are read as those of North America. A word announces only the number right after it.
        for number in phonenumbers.PhoneNumberMatcher(candidate[0], "US", phonenumbers.Leniency.VALID):
            span = begin + number.start, begin + number.end
            if _is_phone(text, span, number.raw_string, is_announced=is_announced and not number.start):
                yield span


def _is_phone(text: str, span: Span, number: str, *, is_announced: bool) -> bool:
    """Return whether a valid number is a phone number, by the characters around it, and by its form or a word before it."""
    begin, end = span
    before = text[begin - 1 : begin] if begin else ""
    # NB: a tuple, because the empty text is in every text.
    is_part = before in tuple("+.-") or before.isalnum() or before == "_"
    # NB: +35236450.6 is a number with a decimal.
    if is_part or re.search(r"\.\d$", number) or not _AFTER_PHONE.match(text, end):
        return False
    return (
        is_announced
        or number.startswith(("+", "(+"))
        or (before != "/" and _GROUPED.fullmatch(number) is not None)
    )


def _find_cards(text: str) -> Iterator[Span]:
    return (match.span() for match in _CARD_NUMBER.finditer(text) if _is_card(match[0]))


def _find_secrets(text: str) -> Iterator[Span]:
    """Yield secrets, by the marks of services and by words before them. Spans may overlap."""
    if not _HAS_MARK.search(text):
        return secret_rules.find(text)
    marked = (match.span() for match in _SECRET.finditer(text) if _is_secret(match[0]))
    assigned = (match.span("value") for expression in _ASSIGNED for match in expression.finditer(text))
    of_urls = (
        match.span("value")
        for match in _PASSWORD_OF_URL.finditer(text)
        if not _NO_PASSWORD.fullmatch(match["value"])
    )
    return chain(marked, assigned, of_urls, secret_rules.find(text))


def _is_card(value: str) -> bool:
    """Return whether a number is in the range of a card network and has a valid check digit (ISO/IEC 7812-1)."""
    digits = re.sub(r"\D", "", value)
    return bool(_CARD_NETWORKS.fullmatch(digits)) and _has_valid_check_digit(digits)


def _has_valid_check_digit(digits: str) -> bool:
    """Check a number by the Luhn algorithm: from the right, each second digit is doubled."""
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(map(int, digits[::-2]))) % 10 == 0


def _is_secret(value: str) -> bool:
    """Return whether a string is a secret, and not the name of a CSS class, which may also begin with sk-."""
    return not value.startswith("sk-") or not _CLASS_NAME.fullmatch(value)


# NB: the order matters: a key may contain what looks like a number or an address.
PATTERNS: dict[RedactKind, Pattern] = {
    "Secret": Pattern(
        "<SECRET>",
        rf"{_MARKS}|{secret_rules.build_hint()}",
        _find_secrets,
    ),
    "Email": Pattern("<EMAIL>", "@", _find_emails),
    "CardNumber": Pattern(
        "<CARD_NUMBER>",
        r"[0-9]{4}[ -]?[0-9]{4}[ -]?[0-9]{4}|[0-9]{4}[ -][0-9]{6}[ -][0-9]{4}",
        _find_cards,
    ),
    "Phone": Pattern(
        "<PHONE>",
        r"\+[0-9][0-9 \x{a0}./()\x{2010}-\x{2013}-]{6}|[0-9]{3}(\)[ \x{a0}]?|[-./\x{2010}-\x{2013}])[0-9]{3}"
        r"|(?i:tel|fono?|phone|mobile?|cell|fax|handy|t\x{e9}l|whatsapp)\.?( (no|number|nr|nummer)\.?)?[:= ]{1,3}[(+]{0,2}[0-9]",
        _find_phones,
    ),
}


def replace_values(text: str, pattern: Pattern) -> tuple[str, int]:
    """Return a text with a placeholder for each value of a kind, and how many there were, for example ("Mail to <EMAIL>", 1).

    Overlapping values count as one.
    """
    # The text before `done` is in `pieces`.
    pieces, done, count = [], 0, 0
    for begin, end in sorted(pattern.find(text)):
        if begin >= done:
            pieces += [text[done:begin], pattern.placeholder]
            count += 1
        done = max(done, end)
    return "".join([*pieces, text[done:]]), count


def sort_kinds(kinds: Sequence[RedactKind]) -> list[RedactKind]:
    """Return kinds in the order in which they are replaced."""
    return [kind for kind in PATTERNS if kind in kinds]
