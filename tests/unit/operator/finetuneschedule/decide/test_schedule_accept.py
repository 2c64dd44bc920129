"""Whether a schedule is accepted, and what its summary says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.finetuneschedule.decide import decide
from finetune_operator.finetuneschedule.decide.ready import summarize_status
from finetune_operator.finetuneschedule.model import DryRunAnswer, Observed, Schedule
from fixtures.operator_in_memory.decisions import NOW, condition
from fixtures.operator_in_memory.schedules import TEMPLATE, schedule, start_time

Json = dict[str, Any]
REFUSAL = DryRunAnswer(admitted=False, reason=ConditionReason.JOB_TEMPLATE_INVALID, message="spec.modle")
REJECTION = DryRunAnswer(admitted=False, reason=ConditionReason.JOB_TEMPLATE_REJECTED, message="quota")
ANSWER = DryRunAnswer(admitted=True, reason=ConditionReason.ACCEPTED, message="accepted")


def new(**fields: Any) -> Schedule:
    """A schedule that no pass has seen."""
    item = schedule(**fields)
    return replace(item, status=item.status.model_copy(update={"conditions": []}))


def summary(conditions: list[Condition]) -> dict[str, str]:
    return {item.type: f"{item.status} {item.reason}" for item in conditions}


class Case(NamedTuple):
    """A schedule, the answer to its dry run, and what follows."""

    schedule: Schedule
    answer: DryRunAnswer | None
    phase: str
    conditions: dict[str, str]


BLOCKED = {"Accepted": "False InvalidSpec", "Ready": "False InvalidSpec", "Stalled": "True InvalidSpec"}
CASES = {
    "a spec that cannot be read": Case(
        replace(new(), spec=None, invalid="spec.schedule: no"), None, "Blocked", BLOCKED
    ),
    "a time zone that is unknown": Case(new(timeZone="No/Where"), None, "Blocked", BLOCKED),
    "no source whose data could change": Case(
        new(onlyIfDataChanged=True, jobTemplate={"spec": {"data": {"splits": {}}}}), None, "Blocked", BLOCKED
    ),
    "a sweep, which trains in any case": Case(
        new(
            onlyIfDataChanged=True,
            jobTemplate={"spec": {"data": {"source": {"type": "Table"}}, "sweep": {"parameters": []}}},
        ),
        None,
        "Blocked",
        BLOCKED,
    ),
    "a template that is wrong": Case(
        new(),
        REFUSAL,
        "Blocked",
        {
            "Accepted": "False JobTemplateInvalid",
            "Ready": "False JobTemplateInvalid",
            "Stalled": "True JobTemplateInvalid",
        },
    ),
    "a template that a policy forbids": Case(
        new(),
        REJECTION,
        "Pending",
        {
            "Accepted": "False JobTemplateRejected",
            "Ready": "False JobTemplateRejected",
            "Reconciling": "True JobTemplateRejected",
        },
    ),
    "a new schedule": Case(
        new(), ANSWER, "Scheduled", {"Accepted": "True Accepted", "Ready": "True Accepted"}
    ),
    "a suspended one": Case(
        new(suspend=True),
        ANSWER,
        "Suspended",
        {"Accepted": "True Accepted", "Suspended": "True Suspended", "Ready": "True Suspended"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_accept(case: Case) -> None:
    handled = case.schedule.status.model_copy(update={"last_schedule_time": NOW})
    item = replace(case.schedule, status=handled)
    decision = decide(item, Observed(dry_run_answer=case.answer), NOW)
    found = decision.status
    assert (found.phase, summary(found.conditions)) == (case.phase, case.conditions)
    assert {entry.observed_generation for entry in found.conditions} == {found.observed_generation} == {1}
    assert (decision.created, decision.dry_run) == (None, None)


def test_the_next_job_is_checked_once_for_each_generation() -> None:
    first = decide(new(), Observed(), NOW).dry_run
    assert first is not None
    assert first["metadata"]["name"] == "nightly-29759820"
    assert first["spec"] == TEMPLATE["spec"]
    assert decide(schedule(), Observed(), NOW).dry_run is None
    assert decide(replace(schedule(), generation=2), Observed(), NOW).dry_run is not None


def test_a_refused_template_is_checked_again() -> None:
    """A policy, or the schema of FineTuneJobs, may have changed; until then, no job is created."""
    refused = condition(ConditionType.ACCEPTED, "False", ConditionReason.JOB_TEMPLATE_INVALID)
    item = schedule(status={"last_schedule_time": start_time(-1)})
    item = replace(item, status=item.status.model_copy(update={"conditions": [refused]}))
    decision = decide(item, Observed(), NOW)
    assert (decision.dry_run is not None, decision.created) == (True, None)
    assert decide(item, Observed(dry_run_answer=ANSWER), NOW).created is not None


def test_a_name_that_is_taken_does_not_make_it_ready() -> None:
    taken = condition(ConditionType.SCHEDULED, "False", ConditionReason.NAME_TAKEN)
    found = summarize_status(schedule(taken), schedule(taken).status, NOW)
    assert summary(found.conditions) == {
        "Accepted": "True Accepted",
        "Scheduled": "False NameTaken",
        "Ready": "False NameTaken",
        "Reconciling": "True NameTaken",
    }
