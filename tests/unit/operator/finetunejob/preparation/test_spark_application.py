"""The preparation as a SparkApplication: followed by its state, repeated under another name, stopped."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, PrepResult, TerminationMessage
from finetune_crds.status import FineTuneJobStatus, SplitCounts
from finetune_crds.status_parts import SparkApplicationStatus
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob, Observed, PreparationLease
from finetune_operator.finetunejob.preparation import backends
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    EVICTED,
    FAILED,
    NOW,
    PREPARED,
    SETTINGS,
    SUCCEEDED,
    UID,
    applied,
    conclude,
    condition,
    controller,
    ftj,
    later,
    lost,
    said,
    stamped,
    status,
)
from unit.operator.finetunejob.preparation.test_spark_manifest import data

Json = dict[str, Any]
NAME = "tune-prep-1"
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
RESULT = PrepResult(
    rows=SplitCounts(train=90), tokens=SplitCounts(train=900), path="s3://splits/a", version=7
)
DONE = TerminationMessage(prep=RESULT)
NO_COLUMN = TerminationMessage(error=PodError(reason="MissingColumn", message="it has no column answer"))


def known(word: str = "Running", *, attempt: int = 1, failures: int = 0) -> Json:
    return {"attempt": attempt, "failures": failures, "name": f"tune-prep-{attempt}", "state": word}


def the_job(before: Json | None, *conditions: Any, **parts: Any) -> FineTuneJob:
    """The job with a SparkApplication in its status."""
    application_status: FineTuneJobStatus = status(
        ACCEPTED, ADMITTED, *([PREPARING] if before else []), *conditions, start_time=NOW
    )
    if before:
        application_status = application_status.model_copy(
            update={"spark_application": SparkApplicationStatus(**before)}
        )
    return ftj(application_status, data=data(), **parts)


def application(word: str = "RUNNING", *, name: str = NAME, error: str = "", **meta: Any) -> Json:
    """A SparkApplication as the spark-operator leaves it."""
    state = {"state": word, **({"errorMessage": error} if error else {})}
    return {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-of-{name}",
            # One that failed has run for a while.
            "creationTimestamp": stamped(-120 if word == "FAILED" else 0),
            **meta,
        },
        **({"status": {"applicationState": state, "driverInfo": {}}} if word else {}),
    }


def driver(phase: str = "Running", *, name: str = NAME, ready: bool = True, **state: Any) -> Json:
    return {
        "metadata": {
            "name": f"{name}-driver",
            "namespace": "team",
            "uid": f"uid-of-{name}-driver",
            "labels": {names.LABEL_UID: UID, names.LABEL_COMPONENT: names.PREP},
            "ownerReferences": [controller("finetune.dev/v1alpha1", "FineTuneJob", UID)],
        },
        "spec": {"containers": [{"name": "spark-kubernetes-driver"}], "nodeName": "node-1"},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}, *state.pop("conditions", [])],
            **state,
        },
    }


def ended(code: int, message: TerminationMessage | str = "", reason: str = "", **more: Any) -> Json:
    """The pod of a driver that has ended."""
    text = message.dump() if isinstance(message, TerminationMessage) else message
    terminated = {"exitCode": code, "reason": reason or "Error", "message": text, "finishedAt": stamped(1)}
    statuses = [{"name": "spark-kubernetes-driver", "state": {"terminated": terminated}}]
    phase = "Failed" if code else "Succeeded"
    return driver(phase, ready=False, containerStatuses=statuses, **more)


def seen(*reported: Json, drivers: tuple[Json, ...] = (), problem: Problem | None = None) -> CustomChildren:
    return CustomChildren({body["metadata"]["name"]: body for body in reported}, drivers, problem)


def decided(job: FineTuneJob, applications: CustomChildren | None, *, at: float = 5, **more: Any) -> Decision:
    return conclude(job, Observed(custom_children=applications, **more), at=later(at))


def summary(decision: Decision) -> tuple[Any, ...]:
    """The SparkApplication of the status, what is made and deleted, and the reasons of Prepared and of Failed."""
    application_status = decision.status.spark_application
    reasons = [
        reported[1] if (reported := said(decision, kind)) else ""
        for kind in (ConditionType.PREPARED, ConditionType.FAILED)
    ]
    return (
        (application_status.name, application_status.failures, application_status.state)
        if application_status
        else None,
        [name for name in applied(decision) if name.startswith("Spark")],
        [f"{item.kind}/{item.name}" for item in decision.delete],
        *reasons,
    )


FIRST, SECOND = "SparkApplication/tune-prep-1", "SparkApplication/tune-prep-2"
DRIVER = "Pod/tune-prep-1-driver"
STATES: dict[str, tuple[Json | None, CustomChildren, tuple[Any, ...]]] = {
    "the first": (None, seen(), ((NAME, 0, "New"), [FIRST], [], "Preparing", "")),
    "one that a crash hid": (None, seen(application("")), ((NAME, 0, "New"), [], [], "Preparing", "")),
    "a driver of an earlier job": (
        None,
        seen(drivers=(driver(name="tune-prep-7"),)),
        (None, [], ["Pod/tune-prep-7-driver"], "Preparing", ""),
    ),
    "new": (known("New"), seen(application("")), ((NAME, 0, "New"), [], [], "Preparing", "")),
    "submitted": (
        known("New"),
        seen(application("SUBMITTED"), drivers=(driver("Pending", ready=False),)),
        ((NAME, 0, "Submitted"), [], [], "Preparing", ""),
    ),
    "running": (
        known("Submitted"),
        seen(application(), drivers=(driver(),)),
        ((NAME, 0, "Running"), [], [], "Preparing", ""),
    ),
    "succeeding": (
        known(),
        seen(application("SUCCEEDING"), drivers=(ended(0, DONE),)),
        ((NAME, 0, "Succeeding"), [], [], "Preparing", ""),
    ),
    "completed": (
        known(),
        seen(application("COMPLETED"), drivers=(ended(0, DONE),)),
        ((NAME, 0, "Completed"), [], [], "Prepared", ""),
    ),
    "completed by another program": (
        known(),
        seen(application("COMPLETED"), drivers=(ended(0, "bye"),)),
        ((NAME, 0, "Completed"), [], [], "PreparationFailed", "PreparationFailed"),
    ),
    "completed, and its pod is gone": (
        known(),
        seen(application("COMPLETED")),
        (("tune-prep-2", 0, "New"), [SECOND], [FIRST], "Preparing", ""),
    ),
    "failing": (
        known(),
        seen(application("FAILING"), drivers=(ended(1),)),
        ((NAME, 0, "Failing"), [], [], "Preparing", ""),
    ),
    "the data are wrong": (
        known(),
        seen(application("FAILED"), drivers=(ended(65, NO_COLUMN),)),
        ((NAME, 0, "Failed"), [], [], "DataWrong", "DataWrong"),
    ),
    "the recipe is wrong": (
        known(),
        seen(application("FAILED"), drivers=(ended(64, NO_COLUMN),)),
        ((NAME, 0, "Failed"), [], [], "RecipeWrong", "RecipeWrong"),
    ),
    "a crash": (
        known(),
        seen(application("FAILED"), drivers=(ended(1),)),
        (("tune-prep-2", 1, "New"), [SECOND], [], "Preparing", ""),
    ),
    "the second crash": (
        known(attempt=2, failures=1),
        seen(application("FAILED", name="tune-prep-2"), drivers=(ended(1, name="tune-prep-2"),)),
        (("tune-prep-3", 2, "New"), ["SparkApplication/tune-prep-3"], [], "Preparing", ""),
    ),
    "the third crash": (
        known(attempt=3, failures=2),
        seen(application("FAILED", name="tune-prep-3"), drivers=(ended(1, name="tune-prep-3"),)),
        (("tune-prep-3", 2, "Failed"), [], [], "PreparationFailed", "PreparationFailed"),
    ),
    "an eviction is no failure": (
        known(failures=2),
        seen(application("FAILED"), drivers=(ended(137, conditions=EVICTED),)),
        (("tune-prep-2", 2, "New"), [SECOND], [], "Preparing", ""),
    ),
    "its driver is lost with its node": (
        known(failures=2),
        seen(application(), drivers=(lost(driver()),)),
        ((NAME, 2, "Running"), [], [FIRST], "Preparing", ""),
    ),
    "its driver was lost with its node, and it is gone": (
        known(failures=2),
        seen(drivers=(lost(driver()),)),
        (("tune-prep-2", 2, "New"), [SECOND], [], "Preparing", ""),
    ),
    "failed without a pod": (
        known(),
        seen(application("FAILED", error="driver pod not found")),
        (("tune-prep-2", 1, "New"), [SECOND], [], "Preparing", ""),
    ),
    "not submitted": (
        known("New"),
        seen(application("SUBMISSION_FAILED", error="spark-submit: no such image")),
        ((NAME, 0, "SubmissionFailed"), [], [], "Preparing", ""),
    ),
    "to be run again": (
        known(),
        seen(application("PENDING_RERUN")),
        ((NAME, 0, "PendingRerun"), [], [FIRST], "Preparing", ""),
    ),
    "changed by somebody": (
        known(),
        seen(application("INVALIDATING")),
        ((NAME, 0, "Invalidating"), [], [FIRST], "Preparing", ""),
    ),
    "being deleted": (
        known(),
        seen(application(deletionTimestamp=stamped(1)), drivers=(driver(),)),
        ((NAME, 0, "Running"), [], [DRIVER], "Preparing", ""),
    ),
    "deleted by somebody": (
        known(),
        seen(),
        (("tune-prep-2", 0, "New"), [SECOND], [], "Preparing", ""),
    ),
    "complete and being deleted": (
        known(),
        seen(application("COMPLETED", deletionTimestamp=stamped(1)), drivers=(ended(0, DONE),)),
        ((NAME, 0, "Completed"), [], [], "Prepared", ""),
    ),
    "unknown": (known(), seen(application("UNKNOWN")), ((NAME, 0, "Unknown"), [], [], "Preparing", "")),
    "held by a queue": (
        known(),
        seen(application("SUSPENDED")),
        ((NAME, 0, "Suspended"), [], [], "Preparing", ""),
    ),
    "a word of a later version": (
        known(),
        seen(application("BEING_NEW")),
        ((NAME, 0, "BeingNew"), [], [], "Preparing", ""),
    ),
    "no spark-operator": (
        None,
        seen(problem=Problem(ConditionReason.SPARK_OPERATOR_MISSING, "install it")),
        (None, [], [], "SparkOperatorMissing", ""),
    ),
    "no spark-operator any more": (
        known(),
        seen(problem=Problem(ConditionReason.SPARK_OPERATOR_MISSING, "install it")),
        ((NAME, 0, "Running"), [], [], "SparkOperatorMissing", ""),
    ),
}


@pytest.mark.parametrize(("before", "applications", "expected"), STATES.values(), ids=STATES)
def test_each_state_has_its_answer(
    before: Json | None, applications: CustomChildren, expected: tuple[Any, ...]
) -> None:
    decision = decided(the_job(before), applications)
    assert summary(decision) == expected
    finished = expected[-1] or expected[-2] == "Prepared"
    assert finished or decision.requeue_seconds is not None


SENTENCES: dict[str, tuple[CustomChildren, float, str]] = {
    "new": (seen(application("")), 5, "SparkApplication tune-prep-1 waits for the spark-operator"),
    "not seen": (
        seen(application("")),
        61,
        "SparkApplication tune-prep-1 waits for the spark-operator, which has not handled it for 60 s: check whether it runs, and whether "
        "it watches namespace team (spark.jobNamespaces of its chart)",
    ),
    "submitted": (
        seen(application("SUBMITTED")),
        5,
        "SparkApplication tune-prep-1 was submitted, and its driver is starting",
    ),
    "running": (
        seen(application(), drivers=(driver(),)),
        5,
        "Spark is running on 0 of 2 executors; kubectl logs tune-prep-1-driver shows its progress",
    ),
    "not running yet": (
        seen(application(), drivers=(driver(ready=False),)),
        5,
        "the driver of SparkApplication tune-prep-1 is starting; kubectl logs tune-prep-1-driver shows its progress",
    ),
    "not submitted": (
        seen(application("SUBMISSION_FAILED", error="failed to run spark-submit: no")),
        5,
        "SparkApplication tune-prep-1 could not be submitted (failed to run spark-submit: no)",
    ),
    "a crash": (
        seen(application("FAILED"), drivers=(ended(1, "Traceback\nKeyError: 'x'"),)),
        5,
        "SparkApplication tune-prep-1 failed (Traceback\nKeyError: 'x'): SparkApplication tune-prep-2 waits for the "
        "spark-operator",
    ),
    "out of memory": (
        seen(application("FAILED"), drivers=(ended(137, reason="OOMKilled"),)),
        5,
        "SparkApplication tune-prep-1 failed (the driver exceeded the memory limit of its pod, which is driverMemory plus 40%: create another "
        "FineTuneJob with more data.prepare.spark.driverMemory, or more spark.driver.memoryOverhead in data.prepare.spark.conf): SparkApplication tune-prep-2 waits for the spark-operator",
    ),
    "no pod": (
        seen(application("FAILED", error="driver pod not found")),
        5,
        "SparkApplication tune-prep-1 failed (driver pod not found): SparkApplication tune-prep-2 waits for the spark-operator",
    ),
    "wrong data": (
        seen(application("FAILED"), drivers=(ended(65, NO_COLUMN),)),
        5,
        "preparation failed in pod tune-prep-1-driver on node node-1 of SparkApplication tune-prep-1: it has no column answer",
    ),
    "an earlier driver stops": (
        seen(drivers=(driver(),)),
        5,
        "the preparation waits for pod tune-prep-1-driver on node node-1 to stop",
    ),
    "changed": (
        seen(application("PENDING_RERUN")),
        5,
        "SparkApplication tune-prep-1 was changed and is being replaced",
    ),
}


@pytest.mark.parametrize(("applications", "at", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_what_is_said_of_it(applications: CustomChildren, at: float, sentence: str) -> None:
    reported = said(decided(the_job(known()), applications, at=at), ConditionType.PREPARED)
    assert reported
    assert reported[2] == sentence


def test_the_result_stands_in_the_status() -> None:
    after = decided(the_job(known()), seen(application("COMPLETED"), drivers=(ended(0, DONE),))).status
    assert after.data
    assert (after.data.path, after.data.version, after.data.rows) == (
        "s3://splits/a",
        7,
        SplitCounts(train=90),
    )


def test_a_failure_stands_in_the_status() -> None:
    after = decided(the_job(known()), seen(application("FAILED"), drivers=(ended(65, NO_COLUMN),))).status
    assert after.last_failure
    assert (after.last_failure.pod, after.last_failure.exit_code, after.last_failure.reason) == (
        "tune-prep-1-driver",
        65,
        "MissingColumn",
    )


STOPS: dict[str, tuple[Json | None, CustomChildren, tuple[Any, ...]]] = {
    "nothing yet": (None, seen(), (None, [], "no pod runs; set suspend to false to resume")),
    "at work": (
        known(),
        seen(application(), drivers=(driver(),)),
        ("Running", [FIRST, DRIVER], "waiting for pod tune-prep-1-driver on node node-1 to stop"),
    ),
    "without a driver yet": (
        known("New"),
        seen(application("")),
        ("New", [FIRST], "waiting for SparkApplication tune-prep-1 to stop"),
    ),
    "ending": (
        known(),
        seen(application(deletionTimestamp=stamped(1))),
        ("Running", [], "waiting for SparkApplication tune-prep-1 to stop"),
    ),
    "gone": (known(), seen(), ("Deleted", [], "no pod runs; set suspend to false to resume")),
    "complete meanwhile": (
        known(),
        seen(application("COMPLETED"), drivers=(ended(0, DONE),)),
        ("Completed", [], "no pod runs; set suspend to false to resume"),
    ),
    "a driver that comes late": (
        known("Deleted"),
        seen(drivers=(driver("Pending"),)),
        ("Deleted", [DRIVER], "waiting for pod tune-prep-1-driver on node node-1 to stop"),
    ),
    "one that the status does not know": (
        None,
        seen(application("")),
        (None, [FIRST], "waiting for SparkApplication tune-prep-1 to stop"),
    ),
    "no rights any more": (
        known(),
        seen(problem=Problem(ConditionReason.SPARK_OPERATOR_FORBIDDEN, "it may not")),
        ("Running", [], "it may not"),
    ),
    "the spark-operator is uninstalled": (
        known(),
        seen(problem=Problem(ConditionReason.SPARK_OPERATOR_MISSING, "install it")),
        ("Running", [], "no pod runs; set suspend to false to resume"),
    ),
}


@pytest.mark.parametrize(("before", "applications", "expected"), STOPS.values(), ids=STOPS)
def test_a_suspended_job_stops_it(
    before: Json | None, applications: CustomChildren, expected: tuple[Any, ...]
) -> None:
    decision = decided(the_job(before, suspend=True), applications)
    application_status, reported = decision.status.spark_application, said(decision, ConditionType.SUSPENDED)
    assert reported
    removed = [f"{item.kind}/{item.name}" for item in decision.delete]
    assert (application_status.state if application_status else None, removed, reported[2]) == expected
    assert applied(decision) == []


def test_a_resumed_job_has_another() -> None:
    assert summary(decided(the_job(known("Deleted", attempt=3, failures=1)), seen())) == (
        ("tune-prep-4", 1, "New"),
        ["SparkApplication/tune-prep-4"],
        [],
        "Preparing",
        "",
    )


def test_it_takes_no_lease_and_does_not_start_while_its_mlflow_run_is_pending() -> None:
    job = ftj(status(ACCEPTED, ADMITTED), data=data())
    observation = Observed(custom_children=seen(), lease=PreparationLease())
    decision = conclude(job, observation, settings=SETTINGS)
    assert (decision.lease, decision.apply, decision.status.start_time) == (None, (), None)
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "preparation waits for an answer of MLflow",
    )


def test_the_deadline_stops_it() -> None:
    job = the_job(known(), runPolicy={"activeDeadlineSeconds": 60})
    decision = decided(job, seen(application(), drivers=(driver(),)), at=61)
    assert [f"{item.kind}/{item.name}" for item in decision.delete] == [FIRST, DRIVER]
    assert (said(decision, ConditionType.FAILED) or ("", ""))[1] == ConditionReason.DEADLINE_EXCEEDED


FOLLOWED: dict[str, tuple[FineTuneJob, bool]] = {
    "new": (the_job(None), True),
    "at work": (the_job(known()), True),
    "prepared": (ftj(status(PREPARED), data=data()), False),
    "another mode": (ftj(data=data({"mode": "Kubernetes"})), False),
    "failed while it was at work": (the_job(known(), FAILED), True),
    "failed after it": (the_job(known("Failed"), FAILED), False),
    "failed before it": (the_job(None, FAILED), False),
    "succeeded": (the_job(known("Completed"), SUCCEEDED), False),
}


@pytest.mark.parametrize(("job", "expected"), FOLLOWED.values(), ids=FOLLOWED)
def test_which_jobs_it_is_read_for(job: FineTuneJob, expected: bool) -> None:
    assert (backends.find_kind_to_read(job) is not None) is expected


def test_executors_that_cannot_run_are_told_of() -> None:
    waiting = {"name": "spark-kubernetes-executor", "image": "prep:1"} | {
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    }
    executor = driver("Pending", name="tune-prep-1-exec-1", ready=False, containerStatuses=[waiting])
    simulation = seen(application(), drivers=(driver(),))
    reported = said(decided(the_job(known()), simulation, executors=(executor,)), ConditionType.PODS_HEALTHY)
    assert reported
    assert reported[1] == ConditionReason.IMAGE_PULL_FAILED


PAUSES = {0: 10, 1: 20}


@pytest.mark.parametrize(("failures", "seconds"), PAUSES.items())
def test_one_that_fails_at_once_is_not_followed_at_once(failures: int, seconds: int) -> None:
    job = the_job(known("Submitted", failures=failures))
    simulation = seen(application("FAILED", error="exceeded quota", creationTimestamp=stamped(0)))
    waiting = decided(job, simulation, at=seconds - 10)
    assert applied(waiting) == []
    assert said(waiting, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "SparkApplication tune-prep-1 failed (exceeded quota): the next attempt starts in 10 s",
    )
    assert waiting.status.spark_application == SparkApplicationStatus(**known("Failed", failures=failures))
    assert applied(decided(job, simulation, at=seconds))[-1] == "SparkApplication/tune-prep-2"


def test_a_late_driver_of_an_earlier_attempt_goes() -> None:
    late, driver_pod = driver(), driver(name="tune-prep-2")
    simulation = seen(application(name="tune-prep-2"), drivers=(late, driver_pod))
    deleted = decided(the_job(known(attempt=2)), simulation).delete
    assert [(first.kind, first.name) for first in deleted] == [("Pod", "tune-prep-1-driver")]
