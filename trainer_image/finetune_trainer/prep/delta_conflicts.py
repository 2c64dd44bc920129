"""Commits to a Delta table that conflict with other commits, and how often they are tried."""

from __future__ import annotations

MAX_ATTEMPTS = 5
"""How often a commit is tried."""


def list_conflicts() -> tuple[type[Exception], ...]:
    """Return the exceptions of Delta for conflicting commits. NB: they have no common class."""
    from delta import exceptions

    return (
        exceptions.DeltaConcurrentModificationException,
        exceptions.ConcurrentWriteException,
        exceptions.MetadataChangedException,
        exceptions.ProtocolChangedException,
        exceptions.ConcurrentAppendException,
        exceptions.ConcurrentDeleteReadException,
        exceptions.ConcurrentDeleteDeleteException,
        exceptions.ConcurrentTransactionException,
    )
