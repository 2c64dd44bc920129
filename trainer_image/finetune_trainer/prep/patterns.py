"""Patterns of personal data and secrets in texts.

They are made for precision: a number counts only with what makes it a phone or card number, a string only with the mark of
the service that issues it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import phonenumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_crds.cleaning import RedactKind


class Pattern(NamedTuple):
    """What one kind of value looks like.

    hint: an expression of RE2; a text in which it finds nothing has no such value.
    found: finds the values; where it has the group `value`, that is the value.
    holds: whether what was found is such a value.
    """

    placeholder: str
    hint: str
    found: re.Pattern[str]
    holds: Callable[[str], bool]


_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@"
    # The name of an image at twice its size, such as logo@2x.png.
    r"(?![1-9]x\.)"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}"
    # A call after a product of matrices (a@b.sum()), and a path after the account of a Git server (git@host.com:team/code).
    r"(?![A-Za-z0-9_(-]|\.[A-Za-z0-9]|:\S)"
)

_LABEL = "(?:tel|telephone|phone|mobile|cell|fax|telefon|handy|mobil|t\u00e9l\u00e9phone|t\u00e9l|tel\u00e9fono|telefono|whatsapp)"
_ENDS = r"(?!\w|[.,:/-]\d)"
_PHONE = re.compile(
    # With the code of a country.
    rf"(?<![\w+.-])(?P<international>\+[1-9](?:[ ./-]?\(?\d\)?){{6,14}}){_ENDS}"
    # In the form of North America.
    r"|(?<![\w+./-])(?P<american>(?:\([2-9]\d{2}\) ?[2-9]\d{2}-|[2-9]\d{2}(?P<gap>[-.])[2-9]\d{2}(?P=gap))\d{4})"
    rf"{_ENDS}"
    # Any other after a word that says what it is.
    rf"|(?i:\b{_LABEL})\b\.?(?: (?:no|number|nr|nummer)\b\.?)?[:= ]{{1,3}}"
    rf"(?P<labeled>\(?0\d?(?:[ ./-]{{0,3}}\(?\d\)?){{5,13}}){_ENDS}"
)

# Of the networks that issue cards, with the lengths of each.
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
_CARD_NUMBER = re.compile(
    r"(?<![\w.])(?<!\d[ :/+-])(?<![+=]-)"
    r"(?:\d{14,16}|\d{19}|\d{4}(?P<gap>[ -])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{4}(?:(?P=gap)\d{3})?|\d{6}(?P=gap)\d{4,5}))"
    # A date of expiry may follow, and no more groups of digits.
    r"(?!\w|[.:/-]\d| \d{3})"
)

# Each with the least length that its service gives it.
_SECRET = re.compile(
    # A private key in PEM or of OpenPGP: the whole block, or its first line.
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[\sA-Za-z0-9+/=:,.()\\-]{0,20000}?-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
    r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])"
    r"|(?i:aws_?secret_?access_?key)[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
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
    # A JSON web token: two objects of JSON, and a signature.
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{8,5000}\.eyJ[A-Za-z0-9_-]{8,5000}\.[A-Za-z0-9_-]{0,2000}"
)
_CLASS_NAME = re.compile(r"sk-[a-z_-]+[0-9]{0,4}(?:[_-][a-z]+|[_-][0-9]{1,4})*")


def _any(_: str) -> bool:
    return True


def _is_phone(value: str) -> bool:
    """Whether a number is one that a country gives out; one that a word announces needs its length only."""
    if re.search(r"\.\d$", value):
        return False  # a number with a decimal
    if value.startswith(("0", "(0")):
        return 7 <= sum(character.isdigit() for character in value) <= 15
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(value, "US"))
    except phonenumbers.NumberParseException:
        return False


def _is_card(value: str) -> bool:
    """Whether a number is in the range of a network of cards, and its check digit is right (ISO/IEC 7812-1)."""
    digits = re.sub(r"\D", "", value)
    return bool(_CARD_NETWORKS.fullmatch(digits)) and _luhn(digits)


def _luhn(digits: str) -> bool:
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(map(int, digits[::-2]))) % 10 == 0


def _is_secret(value: str) -> bool:
    """Whether a string is random: a class of a style sheet begins with sk- too."""
    return not value.startswith("sk-") or not _CLASS_NAME.fullmatch(value)


# NB: the order counts. A key may hold what looks like a number or an address.
PATTERNS: dict[RedactKind, Pattern] = {
    "Secret": Pattern(
        "<SECRET>",
        r"PRIVATE KEY|(AKIA|ASIA)[A-Z2-7]{16}|(?i:secret_?access_?key)|\bsk-[\w-]{20}|\b[sr]k_(live|test)_|\bgh[pousr]_\w{36}"
        r"|\bgithub_pat_|\bglpat-|\bxox[a-z]-|\bAIza[\w-]{35}|\bhf_\w{34}|\bdapi[0-9a-f]{32}|\bnpm_\w{36}|\beyJ[\w-]{8}",
        _SECRET,
        _is_secret,
    ),
    "Email": Pattern("<EMAIL>", "@", _EMAIL, _any),
    "CardNumber": Pattern(
        "<CARD_NUMBER>",
        r"[0-9]{4}[ -]?[0-9]{4}[ -]?[0-9]{4}|[0-9]{4}[ -][0-9]{6}[ -][0-9]{4}",
        _CARD_NUMBER,
        _is_card,
    ),
    "Phone": Pattern(
        "<PHONE>",
        r"\+[1-9][0-9 ./()-]{6}|[0-9]{3}(\) ?|[-.])[0-9]{3}[-.][0-9]{4}"
        r"|(?i:tel|fono?|phone|mobile?|cell|fax|handy|t\x{e9}l|whatsapp)\.?( (no|number|nr|nummer)\.?)?[:= ]{1,3}\(?0",
        _PHONE,
        _is_phone,
    ),
}


def replaced(text: str, pattern: Pattern) -> tuple[str, int]:
    """Return a text with a placeholder for each value of a kind, and how many there were."""
    count = 0

    def one(found: re.Match[str]) -> str:
        nonlocal count
        value = next((part for name, part in found.groupdict().items() if part and name != "gap"), found[0])
        if not pattern.holds(value):
            return found[0]
        count += 1
        return found[0].replace(value, pattern.placeholder)

    return pattern.found.sub(one, text), count


def in_order(kinds: Sequence[RedactKind]) -> list[RedactKind]:
    """Return kinds in the order in which they are replaced."""
    return [kind for kind in PATTERNS if kind in kinds]
