"""The phase never contradicts the conditions."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from finetune_crds.conditions import SUMMARY, Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus, PromotionPhase
from finetune_operator.modelpromotion.decide.phase import phase
from finetune_operator.modelpromotion.decide.ready import summarize_status
from finetune_operator.modelpromotion.observe import read_promotion
from fixtures.operator_in_memory.decisions import condition
from unit.operator.modelpromotion.decide.rollout import NOW, promotion

METADATA = {
    "name": "champion",
    "namespace": "team",
    "uid": "u1",
    "resourceVersion": "1",
    "creationTimestamp": "2026-08-01T12:00:00Z",
}
SPEC = {"model": "llama", "alias": "champion", "source": {"type": "Version", "version": 3}}
ACCEPTED = condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED)
IN_PLACE = condition(ConditionType.PROMOTED, "True", ConditionReason.PROMOTED)


def not_promoted(reason: ConditionReason) -> list[Condition]:
    return [ACCEPTED, condition(ConditionType.PROMOTED, "False", reason)]


CASES: dict[str, tuple[list[Condition], PromotionPhase]] = {
    "nothing is known": ([], "Pending"),
    "the spec is wrong": (
        [condition(ConditionType.ACCEPTED, "False", ConditionReason.INVALID_SPEC)],
        "Blocked",
    ),
    "another has the alias": (
        [condition(ConditionType.ACCEPTED, "False", ConditionReason.CONFLICT), IN_PLACE],
        "Blocked",
    ),
    "suspended": (
        [ACCEPTED, condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED), IN_PLACE],
        "Suspended",
    ),
    "no model": (not_promoted(ConditionReason.WAITING_FOR_MODEL), "Pending"),
    "no job": (not_promoted(ConditionReason.WAITING_FOR_JOB), "Pending"),
    "a job that failed": (not_promoted(ConditionReason.JOB_FAILED), "Blocked"),
    "a gate failed": (not_promoted(ConditionReason.GATE_FAILED), "Refused"),
    "a gate is open": (not_promoted(ConditionReason.GATE_INCONCLUSIVE), "Pending"),
    "not approved yet": (not_promoted(ConditionReason.AWAITING_APPROVAL), "AwaitingApproval"),
    "not approved in time": (not_promoted(ConditionReason.APPROVAL_TIMED_OUT), "Refused"),
    "soaking": (not_promoted(ConditionReason.SOAKING), "Soaking"),
    "moving": (not_promoted(ConditionReason.PROMOTING), "Promoting"),
    "the registry refuses the move": (not_promoted(ConditionReason.MOVE_REFUSED), "Promoting"),
    "another registry": (not_promoted(ConditionReason.REGISTRY_CHANGED), "Blocked"),
    "moved by someone else": (not_promoted(ConditionReason.ALIAS_MOVED), "Blocked"),
    "the version with the alias is out of bounds": (not_promoted(ConditionReason.BREACHED), "Pending"),
    "regressed": (not_promoted(ConditionReason.REGRESSED), "Refused"),
    "no window is open": (not_promoted(ConditionReason.AWAITING_WINDOW), "Pending"),
    "withdrawn": (not_promoted(ConditionReason.WITHDRAWN), "Refused"),
    "nothing to go back to": (not_promoted(ConditionReason.NOTHING_TO_ROLL_BACK_TO), "Blocked"),
    "in place": ([ACCEPTED, IN_PLACE], "Promoted"),
    "rolled back": (
        [ACCEPTED, condition(ConditionType.PROMOTED, "True", ConditionReason.ROLLED_BACK)],
        "Promoted",
    ),
    "the endpoint is on its way": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.ENDPOINT_UPDATING)],
        "Promoting",
    ),
    "the endpoint failed": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.ENDPOINT_FAILED)],
        "Blocked",
    ),
    "the canary failed": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.CANARY_FAILED)],
        "Blocked",
    ),
    "another has the endpoint": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "Unknown", ConditionReason.CONFLICT)],
        "Blocked",
    ),
    "the endpoint may not be changed": (
        [ACCEPTED, IN_PLACE, condition(ConditionType.SERVED, "False", ConditionReason.DATABRICKS_FORBIDDEN)],
        "Promoting",
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


# Every reason that a condition can have while it is not True, also those that no policy gives it.
UNMET = {
    f"{kind} {status}: {reason}": [item for item in (ACCEPTED, IN_PLACE) if item.type != kind]
    + [condition(kind, status, reason)]
    for kind, status in (
        (ConditionType.ACCEPTED, "False"),
        (ConditionType.PROMOTED, "False"),
        (ConditionType.SERVED, "False"),
        (ConditionType.SERVED, "Unknown"),
    )
    for reason in ConditionReason
}


@pytest.mark.parametrize("settled", [True, False], ids=["at a version that passed", "at no version"])
def test_the_summary_never_contradicts_the_phase(settled: bool) -> None:
    """The phase as the condition Ready and its companions would have it, as kstatus reads them."""
    at_3: dict[str, Any] = {"current": "3", "promoted": "3", "passed": "3"} if settled else {}
    contradictions = {}
    for name, conditions in UNMET.items():
        status = summarize_status(
            promotion(ModelPromotionStatus()), ModelPromotionStatus(conditions=conditions, **at_3), NOW
        )
        summary = {item.type: item.status for item in status.conditions if item.type in SUMMARY}
        if summary not in SUMMARIES[status.phase or ""]:
            contradictions[name] = status.phase, summary
    assert contradictions == {}


STALLED = {"Ready": "False", "Stalled": "True"}
GOING_ON = [{"Ready": "False", "Reconciling": "True"}, {"Ready": "True", "Reconciling": "True"}]
SUMMARIES: dict[str, list[dict[str, str]]] = {
    "Pending": GOING_ON,
    "AwaitingApproval": GOING_ON,
    "Soaking": GOING_ON,
    "Promoting": GOING_ON,
    "Promoted": [{"Ready": "True"}],
    "Refused": [STALLED, {"Ready": "True"}],
    "Blocked": [STALLED],
    "Suspended": [*GOING_ON, {"Ready": "True"}],
}


def test_a_phase_that_an_earlier_version_wrote_is_read_as_none() -> None:
    """A status with it can be read, and the next pass replaces it."""
    for word in ("Evaluating", "RollingOut", "RolledBack", "Drifted", "Conflict", "Failed"):
        earlier_status = {"phase": word, "conditions": [IN_PLACE.to_json()], "current": "3", "promoted": "3"}
        body = {"metadata": METADATA, "spec": SPEC, "status": earlier_status}
        resource = read_promotion(body)
        assert (resource.status.phase, resource.status.current) == (None, "3")
        assert summarize_status(resource, resource.status, NOW).to_json()["phase"] == "Promoted"
