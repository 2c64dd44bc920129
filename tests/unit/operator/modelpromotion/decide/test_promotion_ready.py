"""Ready is True while the alias is at a version that passed, also while the candidate is judged or was refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import (
    Journal,
    ModelPromotionStatus,
    Move,
    MoveReason,
    RollbackStatus,
    Withheld,
)
from finetune_operator.modelpromotion.decide.ready import summarize_status
from fixtures.operator_in_memory.decisions import condition
from unit.operator.modelpromotion.decide.rollout import NOW, promotion

ACCEPTED = condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED)
SUSPENDED = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
AWAY = condition(ConditionType.REGISTRY_READY, "False", ConditionReason.MLFLOW_UNREACHABLE)
REACHED = condition(ConditionType.REGISTRY_READY, "True", ConditionReason.REGISTRY_READY)
PROMOTED = condition(ConditionType.PROMOTED, "True", ConditionReason.PROMOTED)
CANARY = condition(ConditionType.SERVED, "False", ConditionReason.CANARY)
SERVED = condition(ConditionType.SERVED, "True", ConditionReason.ENDPOINT_READY)


def not_promoted(reason: ConditionReason) -> Condition:
    return condition(ConditionType.PROMOTED, "False", reason)


def moved(to: str, reason: MoveReason = "Promoted") -> Move:
    return Move(to_version=to, reason=reason, message="it moved", by="jane", time=NOW)


REFUSED = not_promoted(ConditionReason.GATE_FAILED)
AT_3: dict[str, Any] = {"current": "3", "promoted": "3", "history": [moved("3")]}
FAILED_AT_ENDPOINT = Withheld(version="3", reason="Withdrawn", digest="d", message="its endpoint failed")


@dataclass(frozen=True)
class Case:
    """What Ready says of a status."""

    conditions: list[Condition]
    explanation: Condition
    holds: bool
    status: dict[str, Any] = field(default_factory=lambda: AT_3)
    spec: dict[str, Any] = field(default_factory=dict)


MOVING = not_promoted(ConditionReason.PROMOTING)
CONFLICT = condition(ConditionType.ACCEPTED, "False", ConditionReason.CONFLICT)
MOVED_BY_HAND = not_promoted(ConditionReason.ALIAS_MOVED)
CHANGED = condition(ConditionType.REGISTRY_READY, "False", ConditionReason.REGISTRY_CHANGED)
STOPPED_BY_CHANGE = not_promoted(ConditionReason.REGISTRY_CHANGED)
INTERNAL = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.INTERNAL_ERROR)
FOUND_AT_3 = AT_3 | {"history": []}
BACK_TO_2 = RollbackStatus(requested="2", version="2")
WITHDRAWN = not_promoted(ConditionReason.WITHDRAWN)

CASES: dict[str, Case] = {
    "in place": Case([ACCEPTED, PROMOTED], PROMOTED, holds=True),
    "in place and served": Case([ACCEPTED, PROMOTED, SERVED], PROMOTED, holds=True),
    "the canary runs": Case([ACCEPTED, PROMOTED, CANARY], CANARY, holds=False),
    "the canary runs and the next candidate is refused": Case(
        [ACCEPTED, REFUSED, CANARY], CANARY, holds=False
    ),
    "the registry is away": Case([ACCEPTED, AWAY, PROMOTED], AWAY, holds=True),
    "the registry was never reached": Case([ACCEPTED, AWAY], AWAY, holds=False, status={}),
    "the candidate is refused": Case([ACCEPTED, REFUSED], REFUSED, holds=True),
    "the first candidate is refused": Case([ACCEPTED, REFUSED], REFUSED, holds=False, status={}),
    "refused, and the alias is at a version that was there before": Case(
        [ACCEPTED, REFUSED], REFUSED, holds=False, status=FOUND_AT_3
    ),
    "refused, and the alias is at a version that was in place": Case(
        [ACCEPTED, REFUSED],
        REFUSED,
        holds=True,
        status=FOUND_AT_3 | {"passed": "3"},
    ),
    "refused, and another version was in place": Case(
        [ACCEPTED, REFUSED],
        REFUSED,
        holds=False,
        status=FOUND_AT_3 | {"passed": "2"},
    ),
    "refused, and the move to the alias's version was overtaken": Case(
        [ACCEPTED, REFUSED], REFUSED, holds=False, status=AT_3 | {"history": [moved("3", "Overtaken")]}
    ),
    "moving on": Case([ACCEPTED, MOVING], MOVING, holds=True),
    "rolling back": Case(
        [ACCEPTED, MOVING],
        MOVING,
        holds=False,
        status=AT_3 | {"rollback": BACK_TO_2},
        spec={"rollbackTo": {"type": "Version", "version": "2"}},
    ),
    "moved by hand": Case(
        [ACCEPTED, MOVED_BY_HAND], MOVED_BY_HAND, holds=False, status=AT_3 | {"current": "4"}
    ),
    "being put back": Case([ACCEPTED, MOVING], MOVING, holds=False, status=AT_3 | {"current": "4"}),
    "failed at its endpoint": Case(
        [ACCEPTED, WITHDRAWN],
        WITHDRAWN,
        holds=False,
        status=AT_3 | {"journal": Journal(withheld=FAILED_AT_ENDPOINT)},
    ),
    "the next version failed at its endpoint": Case(
        [ACCEPTED, WITHDRAWN],
        WITHDRAWN,
        holds=True,
        status=AT_3 | {"journal": Journal(withheld=FAILED_AT_ENDPOINT.model_copy(update={"version": "4"}))},
    ),
    "suspended": Case([ACCEPTED, SUSPENDED, PROMOTED], SUSPENDED, holds=True),
    "suspended, and moved by hand": Case(
        [ACCEPTED, SUSPENDED, PROMOTED], SUSPENDED, holds=False, status=AT_3 | {"current": "4"}
    ),
    "suspended, and the registry is another one": Case(
        [ACCEPTED, SUSPENDED, CHANGED, STOPPED_BY_CHANGE], SUSPENDED, holds=False
    ),
    "suspended, and the registry was another one before it went away": Case(
        [ACCEPTED, SUSPENDED, AWAY, STOPPED_BY_CHANGE], SUSPENDED, holds=False
    ),
    "suspended, and the registry is the same again": Case(
        [ACCEPTED, SUSPENDED, REACHED, STOPPED_BY_CHANGE], SUSPENDED, holds=True
    ),
    "suspended before a rollback": Case(
        [ACCEPTED, SUSPENDED, PROMOTED],
        SUSPENDED,
        holds=False,
        spec={"rollbackTo": {"type": "Version", "version": "2"}},
    ),
    "another promotion has the alias": Case([CONFLICT, PROMOTED], CONFLICT, holds=False),
    "an error of the operator": Case([INTERNAL, PROMOTED], INTERNAL, holds=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ready(case: Case) -> None:
    status = ModelPromotionStatus(conditions=case.conditions, **case.status)
    job_status = summarize_status(promotion(ModelPromotionStatus(), **case.spec), status, NOW)
    message = case.explanation.message
    if case.holds and case.explanation != PROMOTED:
        message = f"champion is at version 3, which passed its gates or was chosen by a person; {message}"
    (ready,) = (item for item in job_status.conditions if item.type == ConditionType.READY)
    assert (ready.status, ready.reason, ready.message) == (str(case.holds), case.explanation.reason, message)


PROGRESS: dict[str, ConditionType | None] = {
    "in place": None,
    "in place and served": None,
    "the canary runs": ConditionType.RECONCILING,
    "the registry is away": ConditionType.RECONCILING,
    "the registry was never reached": ConditionType.RECONCILING,
    "the candidate is refused": None,
    "the first candidate is refused": ConditionType.STALLED,
    "moving on": ConditionType.RECONCILING,
    "moved by hand": ConditionType.STALLED,
    "suspended": None,
    "suspended, and moved by hand": ConditionType.RECONCILING,
    "another promotion has the alias": ConditionType.STALLED,
    "an error of the operator": ConditionType.RECONCILING,
}


@pytest.mark.parametrize(("name", "expected"), PROGRESS.items(), ids=PROGRESS)
def test_progress(name: str, expected: ConditionType | None) -> None:
    case = CASES[name]
    status = ModelPromotionStatus(conditions=case.conditions, **case.status)
    job_status = summarize_status(promotion(ModelPromotionStatus(), **case.spec), status, NOW)
    kinds = (ConditionType.RECONCILING, ConditionType.STALLED)
    assert [item.type for item in job_status.conditions if item.type in kinds] == (
        [expected] if expected else []
    )


def test_a_version_that_was_in_place_stays_one_that_passed_while_another_is_judged() -> None:
    job_status = summarize_status(
        promotion(ModelPromotionStatus()),
        in_place := ModelPromotionStatus(
            conditions=[ACCEPTED, condition(ConditionType.PROMOTED, "True", ConditionReason.IN_PLACE)],
            **FOUND_AT_3,
        ),
        NOW,
    )
    assert (in_place.passed, job_status.passed) == (None, "3")
    refused = job_status.model_copy(update={"conditions": [ACCEPTED, REFUSED]})
    elsewhere = refused.model_copy(update={"promoted": "2", "current": "2"})
    passed = [summarize_status(promotion(job_status), status, NOW).passed for status in (refused, elsewhere)]
    assert passed == ["3", None]
