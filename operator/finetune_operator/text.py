"""Times, and other people's errors, as a status or a log may show them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime


def stamp(when: datetime | None) -> str:
    """A time in UTC, to the second, as Kubernetes writes it; empty when there is none."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""


def short(text: str, limit: int = 300) -> str:
    """The text on one line, without the ids of requests in brackets, cut where it is too long.

    NB: an id is another one in each answer, and a message that is never the same twice would be a write each time.
    """
    line = _REQUEST_ID.sub("", " ".join(text.split()))
    return line if len(line) <= limit else f"{line[:limit]}..."


# As in [TraceId: 00-1f3a-00] and (Request ID: 1f3a).
_REQUEST_ID = re.compile(r"\s*[\[(](?:trace|req|request|ray)[ _-]?id\b[^\])]*[\])]", re.IGNORECASE)


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, also where it quotes them as Python does."""
    for secret in secrets:
        text = text.replace(secret, "***").replace(repr(secret)[1:-1], "***")
    return text
