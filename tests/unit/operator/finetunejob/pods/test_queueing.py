"""A Job that waits in a queue of Kueue."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import Resolved
from finetune_operator.finetunejob.model import QueueState
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    SOURCE,
    child,
    conclude,
    condition,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
    stamped,
    status,
)

Json = dict[str, Any]
JOB = "tune-train-1"
NOT_ADMITTED = "attempt 1 waits, because queue gpus has not admitted Job tune-train-1: "
LOOK = "check kubectl get localqueue -n team"


def suspended(queue: str | None = "gpus") -> Json:
    job_body = child(JOB, creationTimestamp=stamped(0))
    job_body["spec"]["suspend"] = True
    if queue:
        job_body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue
    return job_body


# What Kueue says, seconds since the Job was created, and reason and message of Trained.
WAITING: dict[str, tuple[QueueState | None, float, str, str]] = {
    "nothing can be read": (
        None,
        60,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus: kubectl get workloads shows why",
    ),
    "there is no Kueue": (
        QueueState(installed=False),
        0,
        ConditionReason.QUEUE_INADMISSIBLE,
        f"{NOT_ADMITTED}Kueue is not installed in this cluster: install Kueue, or remove spec.runPolicy.queueName, "
        "and suspend and resume the job",
    ),
    "Kueue has had no time yet": (
        QueueState(workload=False, read_at=later(29)),
        29,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus",
    ),
    "Kueue had had no time yet when it was asked": (
        QueueState(workload=False, read_at=later(29)),
        34,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus",
    ),
    "Kueue made nothing of it": (
        QueueState(workload=False, read_at=later(30)),
        34,
        ConditionReason.QUEUE_INADMISSIBLE,
        f"{NOT_ADMITTED}Kueue has not created a Workload for the Job: {LOOK}",
    ),
    "a queue that does not exist": (
        QueueState(reason="Inadmissible", message="LocalQueue gpus doesn't exist"),
        60,
        ConditionReason.QUEUE_INADMISSIBLE,
        f"{NOT_ADMITTED}LocalQueue gpus doesn't exist: {LOOK}",
    ),
    "the same in another version of Kueue": (
        QueueState(reason="Misconfigured", message="LocalQueue gpus doesn't exist"),
        60,
        ConditionReason.QUEUE_INADMISSIBLE,
        f"{NOT_ADMITTED}LocalQueue gpus doesn't exist: {LOOK}",
    ),
    "a full queue": (
        QueueState(reason="Pending", message="insufficient unused quota for nvidia.com/gpu", position=3),
        60,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus at position 3: insufficient unused quota for nvidia.com/gpu",
    ),
    "a queue that Kueue has not looked at": (
        QueueState(position=1),
        60,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus at position 1",
    ),
    "admitted": (
        QueueState(admitted=True),
        60,
        ConditionReason.QUEUED,
        "attempt 1 waits in Kueue's queue gpus, which has admitted it",
    ),
}


@pytest.mark.parametrize(("queue_state", "seconds", "reason", "message"), WAITING.values(), ids=WAITING)
def test_waiting(queue_state: QueueState | None, seconds: float, reason: str, message: str) -> None:
    decision = conclude(ftj(running()), observed(suspended(), queue_state=queue_state), at=later(seconds))
    assert said(decision, ConditionType.TRAINED) == ("False", reason, message)
    assert said(decision, ConditionType.READY) == ("False", reason, message)
    assert decision.status.phase == ("Queued" if reason == ConditionReason.QUEUED else "Pending")
    assert decision.requeue_seconds is not None
    assert 5 <= decision.requeue_seconds <= 15


def test_a_preparation_waits_in_the_queue_of_its_job() -> None:
    of = ftj(status(ACCEPTED), data=SOURCE, runPolicy={"queueName": "gpus"})
    (job_body,) = (body for body in conclude(of).apply if body["kind"] == "Job")
    assert job_body["spec"]["suspend"] is True
    assert job_body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    waiting = child("tune-prep", creationTimestamp=stamped(0))
    waiting["spec"]["suspend"] = True
    waiting["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": "gpus"}
    decision = conclude(of, observed(waiting, queue_state=QueueState(message="no quota", position=2)))
    message = "the preparation waits in Kueue's queue gpus at position 2: no quota"
    assert said(decision, ConditionType.PREPARED) == ("False", ConditionReason.QUEUED, message)
    assert decision.status.phase == "Queued"
    assert decision.requeue_seconds is not None
    assert 5 <= decision.requeue_seconds <= 15


def test_a_queue_of_the_installation_is_not_removed_from_the_job() -> None:
    of = ftj(running(resolved=Resolved(queue_name="gpus")))
    decision = conclude(of, observed(suspended(), queue_state=QueueState(installed=False)), at=later(60))
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.QUEUE_INADMISSIBLE,
        "attempt 1 waits, because queue gpus (defaults.queueName of the chart) has not admitted Job tune-train-1: Kueue is not installed "
        'in this cluster: install Kueue, or set spec.runPolicy.queueName to "", which keeps the job '
        "out of the default queue of the chart, and suspend and resume the job",
    )


def test_a_job_that_no_queue_holds() -> None:
    decision = conclude(ftj(running()), observed(suspended(queue=None)), at=later(60))
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.QUEUE_INADMISSIBLE,
        "attempt 1 waits, because another client suspended Job tune-train-1, which has no queue: check kubectl get job tune-train-1 -o yaml",
    )


def test_a_gang_that_kueue_preempts_is_told_about_until_its_pods_have_stopped() -> None:
    observation = observed(
        suspended(), pods=[pod(JOB, 0)], queue_state=QueueState(reason="Pending", message="preempted")
    )
    reported = said(conclude(ftj(running()), observation, at=later(60)), ConditionType.TRAINED)
    message = "attempt 1 waits for pod tune-train-1-0-abcde to stop: Job tune-train-1 was suspended"
    assert reported == ("False", ConditionReason.TRAINING, message)


def test_what_blocked_pods_before_they_went_is_forgotten() -> None:
    before = running()
    blocked = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.UNSCHEDULABLE)
    before = before.model_copy(update={"conditions": [*before.conditions, blocked]})
    decision = conclude(ftj(before), observed(suspended(), queue_state=QueueState(position=1)), at=later(60))
    assert said(decision, ConditionType.PODS_HEALTHY) == (
        "True",
        ConditionReason.PODS_RUNNING,
        "no pod is blocked",
    )


PLACES = {
    1: "1",
    10: "10",
    11: "10 or later",
    19: "10 or later",
    20: "20 or later",
    99: "50 or later",
    100: "100 or later",
    5432: "5000 or later",
}


@pytest.mark.parametrize(("position", "place"), PLACES.items(), ids=map(str, PLACES))
def test_a_position_is_exact_near_the_front(position: int, place: str) -> None:
    decision = conclude(
        ftj(running()), observed(suspended(), queue_state=QueueState(position=position)), at=later(60)
    )
    message = f"attempt 1 waits in Kueue's queue gpus at position {place}"
    assert said(decision, ConditionType.TRAINED) == ("False", ConditionReason.QUEUED, message)


def test_a_job_behind_many_writes_its_status_a_few_times() -> None:
    status, writes = running(), 0
    for ahead in range(200, 0, -1):
        observation = observed(suspended(), queue_state=QueueState(position=ahead))
        job_status = conclude(ftj(status), observation, at=later(60)).status
        status, writes = job_status, writes + (job_status != status)
    assert writes == 15


def test_what_was_known_stays_until_kueue_was_read_again() -> None:
    message = "attempt 1 waits in Kueue's queue gpus at position 3"
    queued = condition(ConditionType.TRAINED, "False", ConditionReason.QUEUED, message)
    before = running()
    before = before.model_copy(
        update={"conditions": [item for item in before.conditions if item.type != "Trained"] + [queued]}
    )
    decision = conclude(ftj(before), observed(suspended(), queue_state=None), at=later(60))
    assert said(decision, ConditionType.TRAINED) == ("False", ConditionReason.QUEUED, message)
