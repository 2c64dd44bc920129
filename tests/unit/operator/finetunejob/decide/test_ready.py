"""Ready is True once the job has succeeded; the summary repeats the condition that explains the phase."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import SUMMARY, Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.decide.ready import ready, summarized
from worlds.memory.decisions import (
    ACCEPTED,
    FAILED,
    NOW,
    PREPARED,
    REGISTERED,
    SUCCEEDED,
    TRAINED,
    TRAINING,
    condition,
    ftj,
    later,
)

REFUSED = condition(ConditionType.ACCEPTED, "False", ConditionReason.INVALID_SPEC)
UNREADABLE = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
STARTING = condition(ConditionType.TRAINED, "False", ConditionReason.STARTING)
REGISTERING = condition(ConditionType.REGISTERED, "False", ConditionReason.REGISTERING)
QUEUED = condition(ConditionType.TRAINED, "False", ConditionReason.QUEUED)
SCALING_UP = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.SCALING_UP)
SUSPENDED = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
HEALTHY = condition(ConditionType.PODS_HEALTHY, "True", ConditionReason.PODS_RUNNING)
UNSCHEDULABLE = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.UNSCHEDULABLE)
UNREACHABLE = condition(ConditionType.TRACKED, "False", ConditionReason.MLFLOW_UNREACHABLE)

ENDS: dict[str, tuple[bool, tuple[ConditionType, ...]]] = {
    "Succeeded": (True, (ConditionType.FINISHED,)),
    "Failed": (False, (ConditionType.STALLED, ConditionType.FINISHED)),
}
CASES: dict[str, tuple[list[Condition], Condition]] = {
    "accepted": ([ACCEPTED], ACCEPTED),
    "preparing": ([ACCEPTED, PREPARING], PREPARING),
    "prepared": ([ACCEPTED, PREPARED], PREPARED),
    "starting": ([ACCEPTED, PREPARED, HEALTHY, STARTING], STARTING),
    "a pod cannot be scheduled": ([ACCEPTED, PREPARED, UNSCHEDULABLE, STARTING], UNSCHEDULABLE),
    "a queue": ([ACCEPTED, PREPARED, HEALTHY, QUEUED], QUEUED),
    "a node is on its way": ([ACCEPTED, PREPARED, SCALING_UP, STARTING], SCALING_UP),
    "training": ([ACCEPTED, PREPARED, HEALTHY, TRAINING], TRAINING),
    "training without MLflow": ([ACCEPTED, UNREACHABLE, PREPARED, TRAINING], TRAINING),
    "trained": ([ACCEPTED, PREPARED, TRAINED], TRAINED),
    "registering": ([ACCEPTED, PREPARED, TRAINED, REGISTERING], REGISTERING),
    "a spec that this version cannot read": ([UNREADABLE, PREPARED, HEALTHY, TRAINING], UNREADABLE),
    "suspended": ([ACCEPTED, SUSPENDED, PREPARED, UNSCHEDULABLE, TRAINING], SUSPENDED),
    "succeeded": ([ACCEPTED, PREPARED, TRAINED, REGISTERED, SUCCEEDED], SUCCEEDED),
    "refused": ([REFUSED, FAILED], FAILED),
    "failed": ([ACCEPTED, PREPARED, UNSCHEDULABLE, TRAINING, FAILED], FAILED),
}


@pytest.mark.parametrize(("conditions", "explanation"), CASES.values(), ids=CASES)
def test_ready(conditions: list[Condition], explanation: Condition) -> None:
    holds, also = ENDS.get(phase(conditions), (False, (ConditionType.RECONCILING,)))
    assert ready(conditions) == (holds, also, explanation.reason, explanation.message)


def test_a_job_that_ends_is_finished_and_at_rest_or_stalled() -> None:
    training = summarized(ftj(), FineTuneJobStatus(conditions=[ACCEPTED, PREPARED, TRAINING]), NOW)
    assert summary(training) == {"Ready": "False", "Reconciling": "True"}
    for end, expected in (
        (SUCCEEDED, {"Ready": "True", "Finished": "True"}),
        (FAILED, {"Ready": "False", "Stalled": "True", "Finished": "True"}),
    ):
        ended = training.model_copy(update={"conditions": [*training.conditions, end]})
        assert summary(summarized(ftj(), ended, later(5))) == expected


def summary(status: FineTuneJobStatus) -> dict[str, str]:
    return {str(item.type): item.status for item in status.conditions if item.type in SUMMARY}


def test_the_transition_time_is_that_of_the_status() -> None:
    before = summarized(ftj(), FineTuneJobStatus(conditions=[ACCEPTED, TRAINING]), NOW)
    training = summarized(
        ftj(), before.model_copy(update={"conditions": [*before.conditions, PREPARED]}), later(5)
    )
    done = summarized(
        ftj(), before.model_copy(update={"conditions": [*before.conditions, SUCCEEDED]}), later(9)
    )
    times = [status.conditions[2].last_transition_time for status in (before, training, done)]
    assert [status.conditions[2].type for status in (before, training, done)] == ["Ready"] * 3
    assert times == [NOW, NOW, later(9)]
