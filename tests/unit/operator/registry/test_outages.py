from __future__ import annotations

import asyncio
import threading

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, NotSentError, Problem
from finetune_operator.registry.outages import Outages

AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "no answer")


def test_a_server_that_cannot_be_reached_is_left_alone_for_a_time() -> None:
    seconds = 100.0
    outages = Outages(lambda: seconds, 10)
    outages.note("http://a", AWAY)
    assert (outages.of("http://a"), outages.of("http://b")) == (AWAY, None)
    seconds = 110.0
    assert outages.of("http://a") is None


def test_a_server_that_answers_with_an_error_is_contacted() -> None:
    outages = Outages(lambda: 0.0, 10)
    outages.note("http://a", Problem(ConditionReason.MLFLOW_FORBIDDEN, "403"))
    assert outages.of("http://a") is None


REFUSED = Problem(ConditionReason.DATABRICKS_FORBIDDEN, "401")


async def test_a_login_that_is_refused_is_remembered_too() -> None:
    seconds, attempts = 100.0, []
    outages = Outages(lambda: seconds, 10)

    def log_in() -> None:
        attempts.append(seconds)
        raise ExternalError(REFUSED)

    for now in (100.0, 101.0, 109.0, 110.0):
        seconds = now
        with pytest.raises(ExternalError) as raised:
            await outages.log_in("secret", log_in)
        assert raised.value.problem == REFUSED
    assert attempts == [100.0, 110.0]
    assert await outages.log_in("corrected", lambda: "token") == "token"
    # Another request to the same server is no login.
    assert await outages.ask("secret", lambda: "answer") == "answer"


async def test_a_request_that_was_not_sent_says_nothing_about_the_server() -> None:
    outages = Outages(lambda: 100.0, 10)

    def write() -> None:
        raise NotSentError(Problem(ConditionReason.MLFLOW_ERROR, "not the leader"))

    for call in (outages.ask, outages.log_in):
        with pytest.raises(NotSentError):
            await call("http://a", write)
        assert await call("http://a", lambda: "answer") == "answer"


async def test_only_one_resource_waits_for_a_server_that_may_be_back() -> None:
    seconds = 100.0
    outages, leave = Outages(lambda: seconds, 10), threading.Event()
    outages.note("http://a", AWAY)
    seconds = 110.0
    first = asyncio.create_task(outages.ask("http://a", lambda: leave.wait(10)))
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(ExternalError) as raised:
            await outages.ask("http://a", lambda: pytest.fail("a second resource waits"))
        assert raised.value.problem == AWAY
    leave.set()
    assert await first
    assert await outages.ask("http://a", lambda: "back") == "back"


async def test_a_server_that_answers_with_an_error_is_back() -> None:
    seconds = 100.0
    outages = Outages(lambda: seconds, 10)
    outages.note("http://a", AWAY)
    seconds = 110.0

    def refuse() -> None:
        raise ExternalError(Problem(ConditionReason.MLFLOW_FORBIDDEN, "403"))

    with pytest.raises(ExternalError):
        await outages.ask("http://a", refuse)
    assert await outages.ask("http://a", lambda: "answer") == "answer"


async def test_a_fault_of_the_operator_is_no_word_of_the_server() -> None:
    seconds = 100.0
    outages = Outages(lambda: seconds, 10)
    outages.note("http://a", AWAY)
    seconds = 110.0

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        await outages.ask("http://a", fail)
    assert await outages.ask("http://a", lambda: "answer") == "answer"
