"""The training pods are judged by a dry run before anything is created, once for each generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.model import Decision, FineTuneJob, Rehearsal
from worlds.memory.decisions import (
    ACCEPTED,
    ADMITTED,
    FINE,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    applied,
    child,
    conclude,
    condition,
    ftj,
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
POD, JOB = "Pod/tune-train-1-0", "Job/tune-train-1"


def asks(decision: Decision) -> list[str]:
    """What is to be created as a dry run, as kind/name."""
    return [f"{body['kind']}/{body['metadata']['name']}" for body in decision.rehearse]


def changed(of: FineTuneJob) -> FineTuneJob:
    """The job after a change of its spec."""
    return dataclasses.replace(of, generation=2)


NEW = ftj(data=SOURCE)
STALLED = ftj(status(TYPO), data=SOURCE)
RUNNING = ftj(status(ACCEPTED, ADMITTED, PREPARING, start_time=NOW), data=SOURCE)
TRAINS = ftj(status(ACCEPTED, PREPARED, start_time=NOW), data=SOURCE)

ASKS: dict[str, tuple[FineTuneJob, list[str]]] = {
    "a new job": (NEW, [JOB, POD]),
    "a new job without a preparation": (ftj(), [POD]),
    "judged": (ftj(status(ADMITTED), data=SOURCE), []),
    "not checked": (ftj(status(UNCHECKED), data=SOURCE), []),
    "beyond a quota": (ftj(status(QUOTA), data=SOURCE), []),
    "refused": (STALLED, []),
    "refused, and changed": (changed(STALLED), [JOB, POD]),
    "refused without a preparation": (ftj(status(POLICY)), []),
    "refused without a preparation, and changed": (changed(ftj(status(POLICY))), [POD]),
    "preparing": (RUNNING, []),
    "preparing, and changed": (changed(RUNNING), [JOB, POD]),
    "prepared, and changed": (changed(TRAINS), []),
    "suspended": (ftj(data=SOURCE, suspend=True), []),
    "not accepted": (ftj(register={"model": "m"}), []),
}


@pytest.mark.parametrize(("of", "expected"), ASKS.values(), ids=ASKS)
def test_what_the_api_server_is_asked(of: FineTuneJob, expected: list[str]) -> None:
    decision = conclude(of, answer=None)
    assert asks(decision) == expected
    if expected:
        assert (decision.apply, decision.actions) == ((), ())
        assert asks(conclude(of)) == []


def test_the_pod_is_one_of_the_jobs_pods() -> None:
    template = {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"pool": "gpu"}}}
    job, pod = conclude(ftj(data=SOURCE, podTemplate=template), answer=None).rehearse
    inner = job["spec"]["template"]
    assert pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**inner["metadata"], "name": "tune-train-1-0", "namespace": "team"},
        "spec": inner["spec"],
    }
    assert (pod["metadata"]["annotations"], pod["spec"]["nodeSelector"]) == ({"a": "b"}, {"pool": "gpu"})


UNKNOWN = Rehearsal(None, ConditionReason.NOT_CHECKED, "no right")
USED_UP = Rehearsal(False, ConditionReason.QUOTA_EXCEEDED, "exceeded quota")
WRONG = Rehearsal(False, ConditionReason.POD_TEMPLATE_INVALID, "unknown field")
FORBIDDEN = Rehearsal(False, ConditionReason.POD_REJECTED, "violates PodSecurity")

PREPARES = ["ConfigMap/tune-prep", "Job/tune-prep"]
TRAINED = ["Service/tune", "ConfigMap/tune-train", "Job/tune-train-1"]
GOES_ON = (ConditionReason.PREPARING, "the prep pod is starting")
STARTS = (ConditionReason.STARTING, "attempt 1: 2 pods are starting")
# The job, the answer, PodsAdmitted, what is created, and the reason and message of Ready.
ANSWERS: dict[str, tuple[FineTuneJob, Rehearsal, str | None, list[str], tuple[str, str]]] = {
    "fine": (NEW, FINE, "True", PREPARES, GOES_ON),
    "not checked": (NEW, UNKNOWN, "Unknown", PREPARES, GOES_ON),
    "beyond a quota": (
        NEW,
        USED_UP,
        "False",
        PREPARES,
        (ConditionReason.QUOTA_EXCEEDED, "exceeded quota"),
    ),
    "a typo": (NEW, WRONG, "False", [], (ConditionReason.POD_TEMPLATE_INVALID, "unknown field")),
    "a policy": (
        NEW,
        FORBIDDEN,
        "False",
        [],
        (ConditionReason.POD_REJECTED, "violates PodSecurity"),
    ),
    "fine after a typo": (changed(STALLED), FINE, "True", PREPARES, GOES_ON),
    "fine without a preparation": (ftj(), FINE, None, TRAINED, STARTS),
    "not checked without a preparation": (ftj(), UNKNOWN, None, TRAINED, STARTS),
    "beyond a quota without a preparation": (ftj(), USED_UP, None, TRAINED, STARTS),
    "a policy without a preparation": (
        ftj(),
        FORBIDDEN,
        "False",
        [],
        (ConditionReason.POD_REJECTED, "violates PodSecurity"),
    ),
    "fine after a policy, without a preparation": (
        changed(ftj(status(POLICY))),
        FINE,
        None,
        TRAINED,
        STARTS,
    ),
}


@pytest.mark.parametrize(("of", "answer", "admitted", "creates", "ready"), ANSWERS.values(), ids=ANSWERS)
def test_what_follows_from_the_answer(
    of: FineTuneJob,
    answer: Rehearsal,
    admitted: str | None,
    creates: list[str],
    ready: tuple[str, str],
) -> None:
    decision = conclude(of, answer=answer)
    expected = (admitted, answer.reason, answer.message) if admitted else None
    assert said(decision, ConditionType.PODS_ADMITTED) == expected
    assert (applied(decision), said(decision, ConditionType.READY)) == (creates, ("False", *ready))
    true = [item.type for item in decision.status.conditions if item.status == "True"]
    assert [kind for kind in ("Reconciling", "Stalled", "Finished") if kind in true] == [
        "Reconciling" if creates else "Stalled"
    ]


def test_the_answer_is_about_the_generation_that_was_asked_about() -> None:
    found: FineTuneJobStatus = conclude(changed(NEW)).status
    (judged,) = (item for item in found.conditions if item.type == ConditionType.PODS_ADMITTED)
    assert judged.observed_generation == 2
    again = dataclasses.replace(changed(NEW), status=found)
    assert conclude(again, answer=None).rehearse == ()


@pytest.mark.parametrize("answer", [WRONG, FORBIDDEN, USED_UP], ids=lambda item: item.reason)
def test_a_preparation_that_runs_goes_on(answer: Rehearsal) -> None:
    decision = conclude(changed(RUNNING), observed(child("tune-prep")), settings=SETTINGS, answer=answer)
    assert (decision.delete, decision.status.phase) == ((), "Preparing")
    assert said(decision, ConditionType.READY) == ("False", answer.reason, answer.message)
    assert said(decision, ConditionType.RECONCILING) is not None


@pytest.mark.parametrize("judged", [ADMITTED, QUOTA], ids=lambda item: item.reason)
def test_once_the_data_are_prepared_the_training_job_itself_tells(judged: Condition) -> None:
    decision = conclude(ftj(status(ACCEPTED, PREPARED, judged, start_time=NOW), data=SOURCE))
    assert said(decision, ConditionType.PODS_ADMITTED) is None
    assert applied(decision)[-1] == JOB
