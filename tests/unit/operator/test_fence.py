"""Requests that write pass the fence only while this process holds the Lease."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import pytest
import requests

from finetune_operator import __main__, bounded
from finetune_operator import fence as fence_module
from finetune_operator.databricks.access import Access
from finetune_operator.databricks.transport import bind
from finetune_operator.databricks.workspace import translate_errors
from finetune_operator.errors import UNREACHABLE, NotSentError
from finetune_operator.fence import READING_METHODS, EventLoop, Fence, NotLeaderError
from finetune_operator.mlflow.client import Client
from support.http_server import Answer, Request, serving


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


# When the fence closes, as it is told in turn (None: at once); the method; the timeout of the request, None if it is refused.
CASES: dict[str, tuple[list[float | None], str, float | None]] = {
    "without an election": ([], "POST", 30),
    "long before the end": ([200], "POST", 30),
    "shortly before the end": ([108], "PATCH", 8),
    "at the end": ([100.4], "DELETE", None),
    "after the end": ([50], "PUT", None),
    "closed": ([None], "POST", None),
    "closed, for a request that reads": ([None], "GET", 30),
    "open again": ([None, 109], "POST", 9),
}


@pytest.mark.parametrize(("ends", "method", "timeout_seconds"), CASES.values(), ids=CASES)
async def test_a_write_ends_before_the_fence_closes(
    ends: list[float | None], method: str, timeout_seconds: float | None
) -> None:
    fence = Fence(Clock())
    for end in ends:
        if end is None:
            fence.close()
        else:
            fence.open_until(end)
    if timeout_seconds is None:
        with pytest.raises(NotLeaderError, match="no longer holds its Lease, so the request was not sent"):
            await fence.limit(method, 30).__aenter__()
    else:
        async with fence.limit(method, 30) as seconds:
            assert seconds == timeout_seconds
            assert fence.writes == (method != "GET")
    assert fence.writes == 0


async def test_a_search_by_post_passes_a_closed_fence_and_counts_as_no_write() -> None:
    fence = Fence(Clock())
    fence.close()
    async with fence.limit("POST", 30, is_read=True) as seconds:
        assert (seconds, fence.writes) == (30, 0)


async def test_a_write_that_was_paused_after_the_check_is_not_sent() -> None:
    """A timer of the event loop ends it, before the loop goes on with what the write waited for."""
    fence = Fence(Clock())
    fence.open_until(100.6)
    loop = asyncio.get_running_loop()
    connected = loop.create_future()
    sent = False

    async def write() -> None:
        nonlocal sent
        async with fence.limit("POST", 30):
            paused_until = loop.time() + 0.7
            while loop.time() < paused_until:
                pass
            loop.call_soon(connected.set_result, None)
            await connected
            sent = True

    with pytest.raises(TimeoutError):
        await write()
    assert (connected.done(), sent, fence.writes) == (True, False, 0)


def test_a_write_is_not_sent_after_the_machine_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of asyncio's own loops stands still while the machine is suspended."""
    suspended_seconds = 0.0

    def clock() -> float:
        return time.monotonic() + suspended_seconds

    monkeypatch.setattr(fence_module, "seconds_since_boot", clock)
    fence = Fence(clock)
    fence.open_until(clock() + 8)
    sent = False

    async def write() -> None:
        nonlocal suspended_seconds, sent
        loop = asyncio.get_running_loop()
        connected = loop.create_future()
        async with fence.limit("POST", 30):
            suspended_seconds = 60.0
            loop.call_soon(connected.set_result, None)
            await connected
            sent = True

    with asyncio.Runner(loop_factory=EventLoop) as runner, pytest.raises(TimeoutError):
        runner.run(write())
    assert (sent, fence.writes) == (False, 0)


def test_every_request_of_the_operator_is_sent_on_that_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def look(*_: object) -> None:
        loops.append(asyncio.get_running_loop())

    monkeypatch.setattr(__main__, "run", look)
    monkeypatch.setattr(__main__, "configure_logging", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["finetune-operator"])
    assert __main__.main() == 0

    def answer(_: Request) -> Answer:
        return Answer(200)

    monkeypatch.setattr(bounded, "_read_body", look)
    with serving(answer) as uri:
        bounded.request_in_thread("GET", uri, headers={}, max_bytes=1000)
    assert [type(loop) for loop in loops] == [EventLoop, EventLoop]


def test_the_fence_closes_by_itself() -> None:
    clock = Clock()
    fence = Fence(clock)
    fence.open_until(108)
    assert fence.is_open
    clock.seconds = 108.0
    assert not fence.is_open


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"])
async def test_the_client_of_other_servers_passes_the_fence(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    fence = Fence()
    fence.close()
    monkeypatch.setattr(bounded, "PROCESS_FENCE", fence)
    seen: list[str] = []

    def answer(request: Request) -> Answer:
        seen.append(request.method)
        return Answer(200)

    with serving(answer) as uri:
        request = bounded.request(method, uri, headers={}, max_bytes=1000)
        if method in READING_METHODS:
            await request
        else:
            with pytest.raises(bounded.FencedError, match="no longer holds its Lease"):
                await request
    assert seen == ([method] if method in READING_METHODS else [])


def ask_mlflow(uri: str) -> None:
    Client(uri).post("runs/update", run_id="r", status="FINISHED")


def ask_databricks(uri: str) -> None:
    access = Access(uri, token="t")
    with translate_errors(access, "cancel a run"), bind(requests.Session()) as session:
        session.post(f"{uri}/api/2.2/jobs/runs/cancel")


@pytest.mark.parametrize("ask", [ask_mlflow, ask_databricks])
def test_a_write_that_was_not_sent_is_no_outage_of_its_server(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], None]
) -> None:
    fence = Fence()
    fence.close()
    monkeypatch.setattr(bounded, "PROCESS_FENCE", fence)
    with pytest.raises(
        NotSentError, match=r"^\w+ at \S+ was not asked: this replica .* no longer holds its Lease"
    ) as raised:
        ask("http://127.0.0.1:9")
    assert raised.value.problem.reason not in UNREACHABLE
