"""One word that never contradicts the conditions."""

from __future__ import annotations

import itertools

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.finetunejob.decide.phase import phase
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    EVALUATED,
    FAILED,
    PREPARED,
    REGISTERED,
    SUCCEEDED,
    TRAINED,
    TRAINING,
    condition,
)

PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
WAITING = condition(ConditionType.PREPARED, "False", ConditionReason.WAITING_FOR_PREPARATION)
STARTING = condition(ConditionType.TRAINED, "False", ConditionReason.STARTING)
RESTARTING = condition(ConditionType.TRAINED, "False", ConditionReason.RESTARTING)
SUSPENDED = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
QUEUED = condition(ConditionType.TRAINED, "False", ConditionReason.QUEUED)
QUEUED_BEFORE = condition(ConditionType.PREPARED, "False", ConditionReason.QUEUED)
QUEUED_AFTER = condition(ConditionType.EVALUATED, "False", ConditionReason.QUEUED)
INADMISSIBLE = condition(ConditionType.TRAINED, "False", ConditionReason.QUEUE_INADMISSIBLE)
EVALUATING = condition(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING)
RESUMED = condition(ConditionType.SUSPENDED, "False", ConditionReason.RESUMED)

PHASES: dict[str, tuple[list[Condition], str]] = {
    "nothing known": ([], "Pending"),
    "accepted": ([ACCEPTED], "Pending"),
    "preparing": ([ACCEPTED, PREPARING], "Preparing"),
    "another job prepares the same": ([ACCEPTED, WAITING], "Pending"),
    "prepared": ([ACCEPTED, PREPARED], "Pending"),
    "the preparation is queued": ([QUEUED_BEFORE], "Queued"),
    "the training is queued": ([PREPARED, QUEUED], "Queued"),
    "the evaluation is queued": ([PREPARED, TRAINED, QUEUED_AFTER], "Queued"),
    "in a queue that does not exist": ([PREPARED, INADMISSIBLE], "Pending"),
    "starting": ([PREPARED, STARTING], "Starting"),
    "training": ([PREPARED, TRAINING], "Training"),
    "restarting": ([PREPARED, RESTARTING], "Starting"),
    "registering": ([PREPARED, TRAINED], "Registering"),
    "evaluating": ([PREPARED, TRAINED, EVALUATING], "Evaluating"),
    "registering after the evaluation": ([PREPARED, TRAINED, EVALUATED], "Registering"),
    "training, and an evaluation that was": ([PREPARED, TRAINING, EVALUATING], "Training"),
    "suspended while evaluating": ([PREPARED, TRAINED, EVALUATING, SUSPENDED], "Suspended"),
    "failed while evaluating": ([PREPARED, TRAINED, EVALUATING, FAILED], "Failed"),
    "suspended while preparing": ([PREPARING, SUSPENDED], "Suspended"),
    "suspended while training": ([PREPARED, TRAINING, SUSPENDED], "Suspended"),
    "suspended while registering": ([PREPARED, TRAINED, SUSPENDED], "Suspended"),
    "resumed": ([PREPARED, TRAINING, RESUMED], "Training"),
    "succeeded": ([PREPARED, TRAINED, REGISTERED, SUCCEEDED], "Succeeded"),
    "failed while training": ([PREPARED, TRAINING, FAILED], "Failed"),
    "failed while suspended": ([PREPARED, SUSPENDED, FAILED], "Failed"),
    "both ends": ([SUCCEEDED, FAILED], "Failed"),
}


@pytest.mark.parametrize(("conditions", "expected"), PHASES.values(), ids=PHASES)
def test_phase(conditions: list[Condition], expected: str) -> None:
    assert phase(conditions) == expected


def test_phase_does_not_depend_on_the_order_of_the_conditions() -> None:
    for order in itertools.permutations([ACCEPTED, PREPARED, TRAINING, SUSPENDED]):
        assert phase(order) == "Suspended"
