"""Ready is True once the job has succeeded; the summary repeats the condition that explains the phase."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from finetune_crds.conditions import SUMMARY, Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.status_parts import Phase
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.decide.ready import assess_readiness, summarize_status
from fixtures.operator_in_memory.decisions import (
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
    assert assess_readiness(conditions) == (holds, also, explanation.reason, explanation.message)


NO_SERVER = condition(ConditionType.ACCEPTED, "False", ConditionReason.MLFLOW_NOT_CONFIGURED)
NOT_THERE = condition(ConditionType.ACCEPTED, "False", ConditionReason.NOT_IMPLEMENTED)
NO_SECRET = condition(ConditionType.TRAINED, "False", ConditionReason.CREDENTIALS_MISSING)
TYPO = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_TEMPLATE_INVALID)
POLICY = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_REJECTED)
QUOTA = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.QUOTA_EXCEEDED)
BROKEN = condition(ConditionType.PODS_ADMITTED, "Unknown", ConditionReason.CHECK_FAILED)
UNCHECKED = condition(ConditionType.PODS_ADMITTED, "Unknown", ConditionReason.NOT_CHECKED)
NO_CHILD = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.POD_TEMPLATE_INVALID)
NO_POD = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.POD_REJECTED)
NAME_TAKEN = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.NAME_TAKEN)

# What explains the job, and whether it waits for a change of its spec.
WAITS: dict[str, tuple[list[Condition], Condition, bool]] = {
    "for a server": ([NO_SERVER], NO_SERVER, False),
    "for another version": ([NOT_THERE], NOT_THERE, False),
    "for a version that can read it": ([UNREADABLE], UNREADABLE, False),
    "for a Secret": ([ACCEPTED, PREPARED, NO_SECRET], NO_SECRET, False),
    "for a template without reserved variables": ([REFUSED], REFUSED, True),
    "for a template without a typo": ([ACCEPTED, TYPO], TYPO, True),
    "for a policy that allows its pods": ([ACCEPTED, POLICY], POLICY, False),
    "for a webhook that answers": ([ACCEPTED, BROKEN], BROKEN, False),
    "for the preparation, then for a webhook": ([ACCEPTED, BROKEN, PREPARING], PREPARING, False),
    "for the preparation, then for another template": ([ACCEPTED, TYPO, PREPARING], TYPO, False),
    "for the preparation, then for a quota": ([ACCEPTED, QUOTA, PREPARING], QUOTA, False),
    "for the preparation, unchecked": ([ACCEPTED, UNCHECKED, PREPARING], PREPARING, False),
    "for a training Job that can be created": ([ACCEPTED, PREPARED, NO_CHILD], NO_CHILD, True),
    "for a preparation that cannot be created again": ([ACCEPTED, NO_CHILD, PREPARING], NO_CHILD, True),
    "for a quota": ([ACCEPTED, PREPARED, NO_POD, STARTING], NO_POD, False),
    "for a name": ([ACCEPTED, PREPARED, NAME_TAKEN], NAME_TAKEN, False),
}


@pytest.mark.parametrize(("conditions", "explanation", "stalled"), WAITS.values(), ids=WAITS)
def test_what_a_job_waits_for(conditions: list[Condition], explanation: Condition, *, stalled: bool) -> None:
    also = ConditionType.STALLED if stalled else ConditionType.RECONCILING
    assert assess_readiness(conditions) == (False, (also,), explanation.reason, explanation.message)


def test_a_job_that_ends_is_finished_and_at_rest_or_stalled() -> None:
    training = summarize_status(ftj(), FineTuneJobStatus(conditions=[ACCEPTED, PREPARED, TRAINING]), NOW)
    assert summary(training) == {"Ready": "False", "Reconciling": "True"}
    for end, expected in (
        (SUCCEEDED, {"Ready": "True", "Finished": "True"}),
        (FAILED, {"Ready": "False", "Stalled": "True", "Finished": "True"}),
    ):
        ended = training.model_copy(update={"conditions": [*training.conditions, end]})
        assert summary(summarize_status(ftj(), ended, later(5))) == expected


def summary(status: FineTuneJobStatus) -> dict[str, str]:
    return {str(item.type): item.status for item in status.conditions if item.type in SUMMARY}


def test_the_transition_time_is_that_of_the_status() -> None:
    before = summarize_status(ftj(), FineTuneJobStatus(conditions=[ACCEPTED, TRAINING]), NOW)
    training = summarize_status(
        ftj(), before.model_copy(update={"conditions": [*before.conditions, PREPARED]}), later(5)
    )
    done = summarize_status(
        ftj(), before.model_copy(update={"conditions": [*before.conditions, SUCCEEDED]}), later(9)
    )
    times = [status.conditions[2].last_transition_time for status in (before, training, done)]
    assert [status.conditions[2].type for status in (before, training, done)] == ["Ready"] * 3
    assert times == [NOW, NOW, later(9)]


CREATED = later(-60)
# The phase and its time before a pass, the conditions after it, and the time of the phase after it.
PHASE_TIMES: dict[str, tuple[Phase | None, datetime | None, list[Condition], datetime | None]] = {
    "a new job that waits": (None, None, [ACCEPTED], CREATED),
    "a new job that starts": (None, None, [ACCEPTED, PREPARING], later(5)),
    "the same phase": ("Training", NOW, [ACCEPTED, PREPARED, TRAINING], NOW),
    "another phase": ("Starting", NOW, [ACCEPTED, PREPARED, TRAINING], later(5)),
    "a status of an earlier version of the operator": ("Training", None, [PREPARED, TRAINING], None),
    "the next phase after that": ("Starting", None, [PREPARED, TRAINING], later(5)),
}


@pytest.mark.parametrize(
    ("phase_before", "since", "conditions", "expected"), PHASE_TIMES.values(), ids=PHASE_TIMES
)
def test_when_a_job_entered_its_phase(
    phase_before: Phase | None,
    since: datetime | None,
    conditions: list[Condition],
    expected: datetime | None,
) -> None:
    job = replace(ftj(FineTuneJobStatus(phase=phase_before, phase_time=since)), created=CREATED)
    after = summarize_status(job, FineTuneJobStatus(conditions=conditions), later(5.5))
    assert after.phase_time == expected
