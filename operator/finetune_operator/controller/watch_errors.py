"""Watches that the API server ends with an error are begun again. kopf itself would end the operator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from kopf._cogs.clients import errors, watching

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
# NB: captured once, so that a second call of `restart_failed_watches` does not wrap the wrapper.
_watch = watching.continuous_watch


def restart_failed_watches() -> None:
    """Let kopf list and watch again after an error that a new list remedies."""
    watching.continuous_watch = _watch_until_error


async def _watch_until_error(**arguments: Any) -> AsyncIterator[Any]:
    """List and watch one kind as kopf does. It ends after such an error, and kopf then begins the next one.

    Any other error of the API server still ends the operator, for example a missing permission.
    """
    try:
        async for event in _watch(**arguments):
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
            arguments["resource"],
            arguments["namespace"] or "all namespaces",
            error.args[0],
        )
        await asyncio.sleep(_PAUSE_SECONDS)
