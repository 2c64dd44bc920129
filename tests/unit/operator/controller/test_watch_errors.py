"""A watch that the API server ends with an error is begun again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kopf import OperatorSettings
from kopf._cogs.clients import errors, watching

from finetune_operator.controller import watch_errors

EXPIRED = errors.APIClientError("too old resource version", status=410, headers={})
LEADER_CHANGED = watching.WatchingError("Error in the watch-stream: etcdserver: leader changed")
FORBIDDEN = errors.APIForbiddenError("jobs is forbidden", status=403, headers={})


async def watch_twice(monkeypatch: pytest.MonkeyPatch, *ends: Exception) -> list[int]:
    """The events of kopf's watch of Jobs, of which each one begins with one event and ends with an error."""
    begun: list[int] = []

    async def watch(**_: Any) -> AsyncIterator[int]:
        begun.append(len(begun))
        yield begun[-1]
        raise ends[begun[-1]]

    monkeypatch.setattr(watch_errors, "_watch", watch)
    monkeypatch.setattr(watch_errors, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)
    watch_errors.restart_failed_watches()
    arguments: dict[str, Any] = {"resource": "jobs", "namespace": "team", "_iterations": len(ends)}
    stream: Any = watching.infinite_watch(settings=OperatorSettings(), **arguments)
    return [event async for event in stream]


async def test_an_expired_version_and_an_error_in_the_stream_begin_another_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await watch_twice(monkeypatch, EXPIRED, LEADER_CHANGED) == [0, 1]
    assert [record.getMessage() for record in caplog.records if record.name == watch_errors.__name__] == [
        "the watch of jobs in team failed: too old resource version; listing and watching again",
        "the watch of jobs in team failed: Error in the watch-stream: etcdserver: leader changed; "
        "listing and watching again",
    ]


async def test_a_missing_permission_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.APIForbiddenError):
        await watch_twice(monkeypatch, FORBIDDEN)
