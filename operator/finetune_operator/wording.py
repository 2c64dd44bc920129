"""Times, and other people's errors, as a status or a log may show them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime


def stamp(when: datetime | None) -> str:
    """A time in UTC, to the second, as Kubernetes writes it; empty when there is none."""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ") if when else ""


def short(text: str, limit: int = 300) -> str:
    """The text on one line, cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."


def masked(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, also where it quotes them as Python does."""
    for secret in secrets:
        text = text.replace(secret, "***").replace(repr(secret)[1:-1], "***")
    return text
