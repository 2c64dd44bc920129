"""The training pods are judged by a dry run before the preparation, once for each generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.decide.admit import rehearsed
from finetune_operator.finetunejob.model import Decision, FineTuneJob, Rehearsal
from worlds.memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    applied,
    child,
    conclude,
    condition,
    ftj,
    later,
    observed,
    said,
    status,
)

Json = dict[str, Any]
QUOTA = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.QUOTA_EXCEEDED)
TYPO = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_TEMPLATE_INVALID)
POLICY = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_REJECTED)
UNCHECKED = condition(ConditionType.PODS_ADMITTED, "Unknown", ConditionReason.NOT_CHECKED)
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)


def rehearsals(decision: Decision) -> list[str]:
    return [f"{body['kind']}/{body['metadata']['name']}" for body in decision.rehearse]


def preparing(judged: Condition | None) -> FineTuneJobStatus:
    """The status of a job whose preparation runs."""
    return status(ACCEPTED, *([judged] if judged else []), PREPARING, start_time=NOW)


BOTH = ["Job/tune-train-1", "Pod/tune-train-1-0"]
PREP = ["ConfigMap/tune-prep", "Job/tune-prep"]

# The job, what it has the API server judge, and what it creates.
CASES: dict[str, tuple[FineTuneJob, list[str], list[str]]] = {
    "a new job": (ftj(data=SOURCE), BOTH, []),
    "admitted": (ftj(status(ADMITTED), data=SOURCE), [], PREP),
    "not checked": (ftj(status(UNCHECKED), data=SOURCE), [], PREP),
    "beyond a quota": (ftj(status(QUOTA), data=SOURCE), [], PREP),
    "a typo": (ftj(status(TYPO), data=SOURCE), [], []),
    "a policy": (ftj(status(POLICY), data=SOURCE), [], []),
    "a typo that was corrected": (
        dataclasses.replace(ftj(status(TYPO), data=SOURCE), generation=2),
        BOTH,
        [],
    ),
    "no preparation": (ftj(), [], ["Service/tune", "ConfigMap/tune-train", "Job/tune-train-1"]),
    "suspended": (ftj(data=SOURCE, suspend=True), [], []),
}


@pytest.mark.parametrize(("of", "rehearses", "creates"), CASES.values(), ids=CASES)
def test_before_the_preparation(of: FineTuneJob, rehearses: list[str], creates: list[str]) -> None:
    decision = conclude(of)
    assert (rehearsals(decision), applied(decision)) == (rehearses, creates)
    if rehearses:
        assert (decision.actions, decision.status.phase) == ((), "Pending")


@pytest.mark.parametrize("judged", [ADMITTED, TYPO, POLICY, QUOTA], ids=lambda item: item.reason)
def test_a_preparation_that_runs_goes_on(judged: Condition) -> None:
    before = ftj(preparing(judged), data=SOURCE)
    changed = dataclasses.replace(before, generation=2)
    seen = observed(child("tune-prep"))
    found = [conclude(of, seen, settings=SETTINGS) for of in (before, changed)]
    assert [rehearsals(decision) for decision in found] == [[], BOTH]
    assert [(item.delete, item.status.phase) for item in found] == [((), "Preparing")] * 2


def test_once_the_data_are_prepared_the_training_job_itself_tells() -> None:
    decision = conclude(ftj(status(ACCEPTED, PREPARED, QUOTA, start_time=NOW), data=SOURCE))
    assert said(decision, ConditionType.PODS_ADMITTED) is None
    assert (rehearsals(decision), applied(decision)[-1]) == ([], "Job/tune-train-1")


def test_the_pod_is_one_of_the_jobs_pods() -> None:
    template = {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"pool": "gpu"}}}
    job, pod = conclude(ftj(data=SOURCE, podTemplate=template)).rehearse
    inner = job["spec"]["template"]
    assert pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**inner["metadata"], "name": "tune-train-1-0", "namespace": "team"},
        "spec": inner["spec"],
    }
    assert (pod["metadata"]["annotations"], pod["spec"]["nodeSelector"]) == ({"a": "b"}, {"pool": "gpu"})


# What Ready then says, and what else is True of the summary.
ANSWERS: dict[str, tuple[Rehearsal, tuple[str, str], str]] = {
    "admitted": (
        Rehearsal(True, ConditionReason.PODS_ADMITTED, "fine"),
        (ConditionReason.ACCEPTED, "the spec can be run"),
        "Reconciling",
    ),
    "not checked": (
        Rehearsal(None, ConditionReason.NOT_CHECKED, "no right"),
        (ConditionReason.ACCEPTED, "the spec can be run"),
        "Reconciling",
    ),
    "beyond a quota": (
        Rehearsal(False, ConditionReason.QUOTA_EXCEEDED, "exceeded quota"),
        (ConditionReason.QUOTA_EXCEEDED, "exceeded quota"),
        "Reconciling",
    ),
    "a typo": (
        Rehearsal(False, ConditionReason.POD_TEMPLATE_INVALID, "unknown field"),
        (ConditionReason.POD_TEMPLATE_INVALID, "unknown field"),
        "Stalled",
    ),
    "a policy": (
        Rehearsal(False, ConditionReason.POD_REJECTED, "violates PodSecurity"),
        (ConditionReason.POD_REJECTED, "violates PodSecurity"),
        "Stalled",
    ),
}


@pytest.mark.parametrize(("answer", "ready", "also"), ANSWERS.values(), ids=ANSWERS)
def test_the_answer_is_in_the_status(answer: Rehearsal, ready: tuple[str, str], also: str) -> None:
    new = dataclasses.replace(ftj(data=SOURCE), generation=2)
    found = rehearsed(new, conclude(new), answer, now=later(5))
    word = {True: "True", False: "False", None: "Unknown"}[answer.admitted]
    assert said(found, ConditionType.PODS_ADMITTED) == (word, answer.reason, answer.message)
    assert said(found, ConditionType.READY) == ("False", *ready)
    true = [item.type for item in found.status.conditions if item.status == "True"]
    assert [kind for kind in ("Reconciling", "Stalled", "Finished") if kind in true] == [also]
    (judged,) = (item for item in found.status.conditions if item.type == ConditionType.PODS_ADMITTED)
    assert (judged.observed_generation, judged.last_transition_time) == (2, later(5))
