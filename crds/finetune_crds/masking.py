"""Masks credentials in texts that other programs write, before a text reaches a status, an Event or a log.

NB: mask a text after everything that reads it: a masked text no longer says what went wrong.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus

MASK = "***"
# A shorter value is masked only where it stands alone: within words, it would make any text unreadable, and show itself.
_MIN_CHARS_WITHIN_WORDS = 6
# A shorter piece of base64 would also be found in other texts.
_MIN_BASE64_CHARS = 10
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|PASSWORD|PASSWD|PASS|SECRET|SECRET_KEY|API_?KEY|ACCESS_KEY|STORAGE_KEY|PRIVATE_KEY|CONNECTION_STRING|"
    # NB: GOOGLE_APPLICATION_CREDENTIALS is a path.
    r"(?<!APPLICATION_)CREDENTIALS)$",
    re.IGNORECASE,
)
# What a variable has that switches something on or off, such as HF_HUB_DISABLE_IMPLICIT_TOKEN.
_SWITCHES = frozenset({"0", "1", "true", "false", "yes", "no"})
# Credentials that can be recognized without knowing them. Only what a named group matches is masked.
# NB: others write these texts, so a search must be linear: where a pattern may fail after a long word, it may not begin again within it.
_PATTERNS = re.compile(
    r"""
      ://[^\s/@:]*:(?P<userinfo>[^\s/@]+(?:@[^\s/@"',]+)*)@
    | (?:authorization["']?\s*[=:]\s*["']?(?:basic|bearer)\s+
        # Without that name only what is no word: it has a digit, or changes from small to capital letters twice.
        |\b(?:basic|bearer)\s+(?=\S*(?:[0-9=]|(?-i:[a-z][A-Z]\S*[a-z][A-Z]))))(?P<header>[A-Za-z0-9+/_.~-]{8,}=*)
    | (?P<prefixed>\b(?:hf_[A-Za-z0-9]{20,}|dapi[a-f0-9]{16,}(?:-\d+)?|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}
        |(?:AKIA|ASIA)[A-Z0-9]{16}|xox[a-z]-[\w-]{10,}|(?<![\w-])(?-i:sk-(?=[\w-]*[0-9A-Z]))[\w-]{20,}|AIza[\w-]{30,}
        |(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*))
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----(?P<key>[\s\S]+?)(?:-----END|\Z)
    # Some values after `token` are numbers and calls in code: next_token=50257, token = tokenizer.convert(7).
    | (?:token(?!["']?\s*=\s*(?:\d+(?![^\s"'&,;)}])|[a-z_]\w*(?:\.\w+)*\([^\s()]{0,100}\)))
        |password|passwd|secret|api[_-]?key|access[_-]?key|account[_-]?key|authorization|x-(?:amz|goog)-signature
        # Of a signed URL of Azure.
        |(?<=[?&])sig|\bsig(?==[^\s"'&]{0,200}%))
        (?:["']?\s*=\s*["']?|["']\s*:\s*["'])(?!<|\*{3}|none\b|null\b|true\b|false\b|basic\b|bearer\b)(?P<assigned>[^\s"'&,;)}]{4,})
    # As YAML writes it. A word of letters alone is text: the server refuses the password: correct the Secret.
    | (?:password|passwd|(?:api|access|account|secret)[_-]?key):[ \t]+["']?(?=[^\s"'&,;)}]*[0-9!@\#$%^*+=~])(?!\*{3})
        (?P<shown>[^\s"'&,;)}]{4,})
    """,
    re.IGNORECASE | re.VERBOSE,
)


def mask(text: str, secrets: Iterable[str]) -> str:
    """Replace credentials in a text by ***: as they are, and escaped for Python, JSON, URLs and base64.

    Args:
        text: the text.
        secrets: the credentials; empty ones are ignored.
    """
    for form in sorted({form for secret in secrets for form in _list_forms(secret)}, key=len, reverse=True):
        if len(form) >= _MIN_CHARS_WITHIN_WORDS:
            text = text.replace(form, MASK)
        else:
            text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", MASK, text)
    return text


def mask_recognized(text: str) -> str:
    """Replace what looks like a credential by ***, also if its value is not known.

    These are passwords in URLs, Authorization headers, known kinds of tokens, private keys, signatures of
    URLs, and values after a name such as `token=`, `"token":` or `password:`.
    """
    return _PATTERNS.sub(_mask_groups, text)


def find_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables whose names are those of credentials, such as HF_TOKEN."""
    return [
        value
        for name, value in environment.items()
        if value and value.strip().lower() not in _SWITCHES and _SECRET_NAME.search(name)
    ]


def _mask_groups(match: re.Match[str]) -> str:
    text = match[0]
    for name, value in match.groupdict().items():
        if value is not None:
            start, end = (place - match.start() for place in match.span(name))
            return f"{text[:start]}{MASK}{text[end:]}"
    return text


def _list_forms(secret: str) -> Iterator[str]:
    """Yield how a credential may stand in a text, as it is and without the spaces and line ends around it."""
    stripped = secret.strip()
    if not stripped:
        return
    if stripped != secret:
        yield from _list_forms(stripped)
    yield secret
    # As Python's repr and as JSON write it, without the quotes.
    yield repr(secret)[1:-1]
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    for escaped in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
        yield escaped
        yield re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), escaped)
    content = secret.encode(errors="surrogateescape")
    for encode in (b64encode, urlsafe_b64encode):
        encoded = encode(content).decode()
        if len(encoded) >= _MIN_BASE64_CHARS:
            yield encoded
            yield encoded.rstrip("=")
        yield from _list_base64_within(content, encode)


def _list_base64_within(content: bytes, encode: Callable[[bytes], bytes]) -> Iterator[str]:
    """Yield the characters of base64 that a credential alone determines, if other bytes precede and follow it, as in user:password."""
    for preceding in range(3):
        encoded = encode(b"\0" * preceding + content).decode()
        # A character has 6 bits; the first and the last may also have bits of other bytes.
        begin = -(-preceding * 8 // 6)
        end = (preceding + len(content)) * 8 // 6
        if end - begin >= _MIN_BASE64_CHARS:
            yield encoded[begin:end]
