"""The phase never contradicts the conditions."""

from __future__ import annotations

from typing import get_args

import pytest

from finetune_crds.conditions import Condition, Reason, Type
from finetune_crds.promotion_status import PromotionPhase
from finetune_operator.decide.promotion.phase import phase
from unit.decide.make import condition

ACCEPTED = condition(Type.ACCEPTED, "True", Reason.ACCEPTED)
IN_PLACE = condition(Type.PROMOTED, "True", Reason.PROMOTED)


def not_promoted(reason: Reason) -> list[Condition]:
    return [ACCEPTED, condition(Type.PROMOTED, "False", reason)]


CASES: dict[str, tuple[list[Condition], PromotionPhase]] = {
    "nothing is known": ([], "Pending"),
    "the spec is wrong": ([condition(Type.ACCEPTED, "False", Reason.INVALID_SPEC)], "Failed"),
    "another has the alias": ([condition(Type.ACCEPTED, "False", Reason.CONFLICT), IN_PLACE], "Conflict"),
    "suspended": ([ACCEPTED, condition(Type.SUSPENDED, "True", Reason.SUSPENDED), IN_PLACE], "Suspended"),
    "no model": (not_promoted(Reason.WAITING_FOR_MODEL), "Pending"),
    "no job": (not_promoted(Reason.WAITING_FOR_JOB), "Pending"),
    "a job that failed": (not_promoted(Reason.JOB_FAILED), "Failed"),
    "a gate failed": (not_promoted(Reason.GATE_FAILED), "Refused"),
    "a gate is open": (not_promoted(Reason.GATE_INCONCLUSIVE), "Evaluating"),
    "nobody approved": (not_promoted(Reason.AWAITING_APPROVAL), "AwaitingApproval"),
    "nobody approved in time": (not_promoted(Reason.APPROVAL_TIMED_OUT), "Refused"),
    "soaking": (not_promoted(Reason.SOAKING), "Soaking"),
    "moving": (not_promoted(Reason.PROMOTING), "Promoting"),
    "moved by somebody else": (not_promoted(Reason.ALIAS_MOVED), "Drifted"),
    "withdrawn": (not_promoted(Reason.WITHDRAWN), "Refused"),
    "nothing to go back to": (not_promoted(Reason.NOTHING_TO_ROLL_BACK_TO), "Failed"),
    "in place": ([ACCEPTED, IN_PLACE], "Promoted"),
    "rolled back": ([ACCEPTED, condition(Type.PROMOTED, "True", Reason.ROLLED_BACK)], "RolledBack"),
    "the endpoint is on its way": (
        [ACCEPTED, IN_PLACE, condition(Type.SERVED, "False", Reason.ENDPOINT_UPDATING)],
        "RollingOut",
    ),
    "the endpoint failed": (
        [ACCEPTED, IN_PLACE, condition(Type.SERVED, "False", Reason.ENDPOINT_FAILED)],
        "Failed",
    ),
    "the registry is away": (
        [ACCEPTED, condition(Type.REGISTRY_READY, "False", Reason.MLFLOW_UNREACHABLE), IN_PLACE],
        "Promoted",
    ),
}


@pytest.mark.parametrize(("conditions", "expected"), CASES.values(), ids=CASES)
def test_phase(conditions: list[Condition], expected: PromotionPhase) -> None:
    assert phase(conditions) == expected


def test_every_phase_occurs() -> None:
    assert {expected for _, expected in CASES.values()} == set(get_args(PromotionPhase))
