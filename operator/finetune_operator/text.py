"""Times and foreign error messages, in the form that statuses and logs show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime


def stamp(when: datetime | None) -> str:
    """A time in UTC, to the second, as Kubernetes writes it; empty when there is none."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""


def short(text: str, limit: int = 300) -> str:
    """The text on one line, without request ids in brackets, truncated to the limit.

    NB: each response has another id; with it in the message, every reconcile would write the status.
    """
    line = _REQUEST_ID.sub("", " ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}..."


# Such as [TraceId: 00-1f3a-00] and (Request ID: 1f3a).
_REQUEST_ID = re.compile(r"\s*[\[(](?:trace|req|request|ray)[ _-]?id\b[^\])]*[\])]", re.IGNORECASE)


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, also where they are quoted as by Python's repr."""
    for secret in secrets:
        text = text.replace(secret, "***").replace(repr(secret)[1:-1], "***")
    return text
