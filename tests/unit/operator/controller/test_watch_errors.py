"""A watch that the API server ends with an error is begun again, and each beginning is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kopf import OperatorSettings
from kopf._cogs.clients import errors, watching

from finetune_operator.controller import watch_errors

EXPIRED_WITHOUT_TEXT = errors.APIClientError(None, status=410, headers={})
EXPIRED = errors.APIClientError("too old resource version", status=410, headers={})
LEADER_CHANGED = watching.WatchingError("Error in the watch-stream: etcdserver: leader changed")
FORBIDDEN = errors.APIForbiddenError("jobs is forbidden", status=403, headers={})


async def watch_until(monkeypatch: pytest.MonkeyPatch, *ends: Exception) -> tuple[list[int], int]:
    """The events of kopf's watch of Jobs, and how many beginnings were reported. Each watch lists nothing, has one event, and ends with an error."""
    begun: list[int] = []
    reported: list[str] = []

    async def watch(**_: Any) -> AsyncIterator[Any]:
        begun.append(len(begun))
        yield watching.Bookmark.LISTED
        yield begun[-1]
        raise ends[begun[-1]]

    monkeypatch.setattr(watch_errors, "_watch", watch)
    monkeypatch.setattr(watch_errors, "_FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(watching, "continuous_watch", watching.continuous_watch)
    watch_errors.restart_failed_watches(lambda: reported.append("listed"))
    arguments: dict[str, Any] = {"resource": "jobs", "namespace": "team", "_iterations": len(ends)}
    stream: Any = watching.infinite_watch(settings=OperatorSettings(), **arguments)
    events = [event async for event in stream if event is not watching.Bookmark.LISTED]
    return events, len(reported)


async def test_an_expired_version_and_an_error_in_the_stream_begin_another_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = EXPIRED, LEADER_CHANGED, EXPIRED_WITHOUT_TEXT
    assert await watch_until(monkeypatch, *ends) == ([0, 1, 2], 3)
    assert [record.getMessage() for record in caplog.records if record.name == watch_errors.__name__] == [
        "the watch of jobs in team failed: too old resource version; listing and watching again",
        "the watch of jobs in team failed: Error in the watch-stream: etcdserver: leader changed; "
        "listing and watching again",
        "the watch of jobs in team failed: HTTP 410; listing and watching again",
    ]


async def test_a_missing_permission_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.APIForbiddenError):
        await watch_until(monkeypatch, FORBIDDEN)


def test_the_pause_grows_while_errors_follow_each_other() -> None:
    times = iter([0.0, 1.0, 4.0, 9.0, 18.0, 35.0, 66.0, 127.0])
    restarts = watch_errors._Restarts(lambda: None, clock=lambda: next(times))
    pauses = [restarts._choose_pause(("jobs", "team")) for _ in range(7)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert restarts._choose_pause(("jobs", "team")) == 1
