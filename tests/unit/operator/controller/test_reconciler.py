"""What the log says of a pass that failed, and that the pass is repeated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.reading import UnreadableStatusError
from finetune_operator.controller.reconciler import Reconciler
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import KubeError
from support.counted import counted

BODY: Json = {"metadata": {"namespace": "team", "name": "tune", "resourceVersion": "1"}}


@dataclass
class Failing(Reconciler):
    """Fails each pass with the same error."""

    kind: ClassVar[str] = "FineTuneJob"

    error: Exception
    complaints: int = 0

    async def reconcile(self, body: Json) -> float | None:
        raise self.error

    def find_longest_wait(self, body: Json) -> float:
        raise AssertionError("a pass that failed is repeated sooner")

    async def report_internal_error(self, body: Json, message: str) -> None:
        self.complaints += 1


@dataclass
class Waiting(Reconciler):
    """Each pass succeeds, and asks for the next one."""

    kind: ClassVar[str] = "FineTuneJob"

    requeue: float | None
    longest_wait: float

    async def reconcile(self, body: Json) -> float | None:
        return self.requeue

    def find_longest_wait(self, body: Json) -> float:
        return self.longest_wait

    async def report_internal_error(self, body: Json, message: str) -> None:
        raise AssertionError(message)


# The level of the log, how often the status reports an internal error, and the reason in the metrics.
ERRORS: dict[str, tuple[Exception, int, int, str]] = {
    "another client wrote meanwhile": (
        KubeError(409, "the object has been modified"),
        logging.INFO,
        0,
        "Conflict",
    ),
    "the API server refuses": (KubeError(403, "forbidden"), logging.WARNING, 0, "Forbidden"),
    "the API server is away": (KubeError(0, "no response"), logging.WARNING, 0, "ApiServerUnreachable"),
    "the API server fails": (KubeError(500, "oops", "AnyWord"), logging.WARNING, 0, "ApiServerError"),
    "MLflow is away": (
        ExternalError(Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")),
        logging.WARNING,
        0,
        "MlflowUnreachable",
    ),
    "a status of a newer operator": (UnreadableStatusError("newer"), logging.WARNING, 0, "UnreadableStatus"),
    "an error of the operator": (KeyError("spec"), logging.ERROR, 1, "InternalError"),
}


@pytest.mark.parametrize(("error", "level", "complaints", "reason"), ERRORS.values(), ids=ERRORS)
async def test_a_pass_that_fails(
    error: Exception, level: int, complaints: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, queue = Store(), WorkQueue(clock=lambda: 0.0)
    store.put("FineTuneJob", BODY)
    failing = Failing(store, queue, error)
    with caplog.at_level(logging.DEBUG), counted("finetune_operator_reconcile_") as changes:
        await failing.handle("team/tune")
    assert [record.levelno for record in caplog.records] == [level]
    assert failing.complaints == complaints
    assert list(queue._due) == ["team/tune"]
    del changes["seconds_sum FineTuneJob"]
    assert changes == {"seconds_count FineTuneJob": 1, f"errors_total FineTuneJob {reason}": 1}


async def test_a_busy_api_server_is_given_the_time_that_it_asks_for() -> None:
    store, queue = Store(), WorkQueue(clock=lambda: 0.0)
    store.put("FineTuneJob", BODY)
    await Failing(store, queue, KubeError(429, "too many requests", retry_after_seconds=20)).handle(
        "team/tune"
    )
    assert 20 <= queue._due["team/tune"].end <= 25


# What a pass asks for, the longest wait, the earliest and the latest time of the next pass, and whether it is routine.
WAITS: dict[str, tuple[float | None, float, tuple[float, float], bool]] = {
    "nothing is polled": (None, 600, (480, 600), True),
    "a server is polled": (5, 600, (5, 5), True),
    "a deadline is far": (7200, 30, (24, 30), True),
    "the status was written": (0.3, 30, (0.3, 0.3), False),
    "at once": (0, 30, (0, 0), False),
}


@pytest.mark.parametrize(("requeue", "longest_wait", "times", "is_routine"), WAITS.values(), ids=WAITS)
async def test_each_pass_plans_the_next(
    requeue: float | None, longest_wait: float, times: tuple[float, float], *, is_routine: bool
) -> None:
    store, queue = Store(), WorkQueue(clock=lambda: 0.0)
    store.put("FineTuneJob", BODY)
    await Waiting(store, queue, requeue, longest_wait).handle("team/tune")
    delay = queue._due["team/tune"]
    assert (times[0] <= delay.end <= times[1], delay.is_routine) == (True, is_routine)


async def test_passes_that_came_together_do_not_stay_together() -> None:
    store, queue = Store(), WorkQueue(clock=lambda: 0.0)
    for number in range(100):
        meta = {**BODY["metadata"], "name": f"tune-{number}"}
        store.put("FineTuneJob", {"metadata": meta})
        await Waiting(store, queue, None, 600).handle(f"team/tune-{number}")
    ends = [delay.end for delay in queue._due.values()]
    assert max(ends) - min(ends) > 60
