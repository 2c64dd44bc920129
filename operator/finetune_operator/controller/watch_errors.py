"""Watches that the API server ends with an error are begun again. kopf itself would end the operator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from kopf._cogs.clients import errors, watching

log = logging.getLogger(__name__)

# The pause before a watch begins again: doubled after each error, and reset when there was no error for a while.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
_RESET_SECONDS = 60.0
# NB: captured once, so that a second call of `restart_failed_watches` does not wrap the wrapper.
_watch = watching.continuous_watch


class _Failure(NamedTuple):
    """When a watch failed, in monotonic seconds, and the pause after that."""

    time: float
    pause_seconds: float


@dataclass
class _Restarts:
    """The watches of one operator.

    Attributes:
        on_listed: called when a watch begins: it does not report objects that were deleted before.
    """

    on_listed: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _last_failures: dict[tuple[Any, str | None], _Failure] = field(default_factory=dict)

    async def watch(self, **arguments: Any) -> AsyncIterator[Any]:
        """List and watch one kind as kopf does. It ends after an error that a new list remedies, and kopf then begins the next one.

        Any other error of the API server still ends the operator, for example a missing permission.
        """
        resource, namespace = arguments["resource"], arguments["namespace"]
        try:
            async for event in _watch(**arguments):
                if event is watching.Bookmark.LISTED:
                    self.on_listed()
                yield event
        except (errors.APIError, watching.WatchingError) as error:
            # The list or the watch continues from a resource version that the API server no longer knows.
            is_expired = isinstance(error, errors.APIError) and error.status == HTTPStatus.GONE
            # An error in the stream, such as a change of etcd's leader.
            is_in_stream = isinstance(error, watching.WatchingError)
            if not is_expired and not is_in_stream:
                raise
            log.warning(
                "the watch of %s in %s failed: %s; listing and watching again",
                resource,
                namespace or "all namespaces",
                error.args[0] if error.args else f"HTTP {HTTPStatus.GONE.value}",
            )
            await asyncio.sleep(self._choose_pause((resource, namespace)))

    def _choose_pause(self, watched: tuple[Any, str | None]) -> float:
        now, last = self.clock(), self._last_failures.get(watched)
        pause_seconds = _FIRST_PAUSE_SECONDS
        if last and now - last.time < _RESET_SECONDS:
            pause_seconds = min(2 * last.pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._last_failures[watched] = _Failure(now, pause_seconds)
        return pause_seconds


def restart_failed_watches(on_listed: Callable[[], None]) -> None:
    """Let kopf list and watch again after an error that a new list remedies.

    Args:
        on_listed: called when a watch begins.
    """
    watching.continuous_watch = _Restarts(on_listed).watch
