"""The phase never contradicts the conditions."""

from __future__ import annotations

from typing import get_args

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import PromotionPhase
from finetune_operator.modelpromotion.decide.phase import phase
from worlds.memory.decisions import condition

ACCEPTED = condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED)
IN_PLACE = condition(ConditionType.PROMOTED, "True", ConditionReason.PROMOTED)


def not_promoted(reason: ConditionReason) -> list[Condition]:
    return [ACCEPTED, condition(ConditionType.PROMOTED, "False", reason)]


CASES: dict[str, tuple[list[Condition], PromotionPhase]] = {
    "nothing is known": ([], "Pending"),
    "the spec is wrong": (
        [condition(ConditionType.ACCEPTED, "False", ConditionReason.INVALID_SPEC)],
        "Failed",
    ),
    "another has the alias": (
        [condition(ConditionType.ACCEPTED, "False", ConditionReason.CONFLICT), IN_PLACE],
        "Conflict",
    ),
    "suspended": (
        [ACCEPTED, condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED), IN_PLACE],
        "Suspended",
    ),
    "no model": (not_promoted(ConditionReason.WAITING_FOR_MODEL), "Pending"),
    "no job": (not_promoted(ConditionReason.WAITING_FOR_JOB), "Pending"),
    "a job that failed": (not_promoted(ConditionReason.JOB_FAILED), "Failed"),
    "a gate failed": (not_promoted(ConditionReason.GATE_FAILED), "Refused"),
    "a gate is open": (not_promoted(ConditionReason.GATE_INCONCLUSIVE), "Evaluating"),
    "not approved yet": (not_promoted(ConditionReason.AWAITING_APPROVAL), "AwaitingApproval"),
    "not approved in time": (not_promoted(ConditionReason.APPROVAL_TIMED_OUT), "Refused"),
    "soaking": (not_promoted(ConditionReason.SOAKING), "Soaking"),
    "moving": (not_promoted(ConditionReason.PROMOTING), "Promoting"),
    "moved by someone else": (not_promoted(ConditionReason.ALIAS_MOVED), "Drifted"),
    "withdrawn": (not_promoted(ConditionReason.WITHDRAWN), "Refused"),
    "nothing to go back to": (not_promoted(ConditionReason.NOTHING_TO_ROLL_BACK_TO), "Failed"),
    "in place": ([ACCEPTED, IN_PLACE], "Promoted"),
    "rolled back": (
        [ACCEPTED, condition(ConditionType.PROMOTED, "True", ConditionReason.ROLLED_BACK)],
        "RolledBack",
    ),
    "the endpoint is on its way": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.ENDPOINT_UPDATING)],
        "RollingOut",
    ),
    "the endpoint failed": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.ENDPOINT_FAILED)],
        "Failed",
    ),
    "the registry is away": (
        [
            ACCEPTED,
            condition(ConditionType.REGISTRY_READY, "False", ConditionReason.MLFLOW_UNREACHABLE),
            IN_PLACE,
        ],
        "Promoted",
    ),
}


@pytest.mark.parametrize(("conditions", "expected"), CASES.values(), ids=CASES)
def test_phase(conditions: list[Condition], expected: PromotionPhase) -> None:
    assert phase(conditions) == expected


def test_every_phase_occurs() -> None:
    assert {expected for _, expected in CASES.values()} == set(get_args(PromotionPhase))
