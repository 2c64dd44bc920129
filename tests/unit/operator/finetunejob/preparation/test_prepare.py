"""The preparation."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, PrepResult, TerminationMessage
from finetune_crds.data import Columns
from finetune_crds.status import DataStatus, SplitCounts
from finetune_crds.status_parts import MAX_DROPPED, Dropped, EvaluationSet, Redacted
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Deletion
from finetune_operator.finetunejob.model import Mlflow
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    LEFT,
    NOW,
    SETTINGS,
    SOURCE,
    UID,
    applied,
    child,
    conclude,
    condition,
    deleted,
    ended,
    failure_of,
    ftj,
    later,
    lost,
    observed,
    pod,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
JOB = "tune-prep"
RESULT = PrepResult(
    rows=SplitCounts(train=90, validation=5, test=5),
    tokens=SplitCounts(train=900, validation=50, test=50),
    path="/data/splits",
    version=7,
    source_version=3,
    source_revision="c0ffee",
    feedback_version=9,
    columns=Columns(type="PromptResponse", prompt="question", response="answer"),
    dropped={"notNull": 4, "minQuality": 0, "dedupe": 6},
    redacted={"Email": 7, "Phone": 0, "Secret": 1},
    evaluation_sets=[EvaluationSet(name="tasks", examples=2, version=4)],
)
PREPARED = TerminationMessage(prep=RESULT)
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
NEW = status(ADMITTED)
BEFORE = status(PREPARING, start_time=NOW)


def error(reason: str, message: str) -> TerminationMessage:
    return TerminationMessage(error=PodError(reason=reason, message=message))


def prep_pod(index: int, code: int, fields: Any = "", at: int = 0, node: str = "") -> Json:
    return ended(JOB, index, code, fields, container="prep", component=names.PREP, at=at, node=node)


def prepare(*jobs: Json, pods: list[Json] | None = None, **parts: Any) -> Any:
    return conclude(ftj(BEFORE, data=SOURCE, **parts), observed(*jobs, pods=pods), at=later(5))


def test_it_waits_for_mlflow_and_not_for_one_that_is_away() -> None:
    created = datetime(2026, 8, 1, 23, 30, tzinfo=timezone(timedelta(hours=-1)))
    job = dataclasses.replace(ftj(NEW, data=SOURCE), created=created)
    unread = conclude(job, observed(), settings=SETTINGS)
    assert (applied(unread), said(unread, ConditionType.PREPARED)) == (
        [],
        ("False", "Preparing", "preparation waits for an answer of MLflow"),
    )
    away = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))
    decision = conclude(job, observed(mlflow=away), settings=SETTINGS)
    assert applied(decision) == ["ConfigMap/tune-prep", "Job/tune-prep"]
    assert (decision.status.phase, decision.status.start_time) == ("Preparing", NOW)
    recipe = yaml.safe_load(decision.apply[0]["data"]["recipe.yaml"])
    assert (recipe["job"], recipe["data"]["source"]) == (
        {"name": "tune", "namespace": "team", "uid": UID, "created": "2026-08-02"},
        {"type": "Parquet", "path": "/data/corpus"},
    )


def test_the_job_retries_what_is_nobodys_fault_and_nothing_else() -> None:
    pods = {"prepare": {"image": "mine:1", "env": [{"name": "A", "value": "b"}]}}
    decision = conclude(
        ftj(NEW, data={**SOURCE, "prepare": {"output": "/out"}}, pods=pods), settings=SETTINGS
    )
    job_body = decision.apply[1]
    assert (job_body["kind"], job_body["metadata"]["name"], job_body["spec"]["backoffLimit"]) == (
        "Job",
        JOB,
        2,
    )
    assert job_body["spec"]["podFailurePolicy"] == {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "prep", "operator": "In", "values": [64, 65]},
            },
        ]
    }
    container = job_body["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["command"]) == ("mine:1", ["finetune-prep"])
    assert container["env"] == [
        {"name": "HOME", "value": "/tmp"},
        {"name": "A", "value": "b"},
        {"name": "FINETUNE_RECIPE", "value": "/etc/finetune/recipe.yaml"},
        {"name": "MLFLOW_TRACKING_URI", "value": "http://mlflow:5000"},
        {"name": "MLFLOW_REGISTRY_URI", "value": "http://mlflow:5000"},
        {"name": "MLFLOW_RUN_ID", "value": "r1"},
    ]


def test_the_pod_gets_four_keys_of_a_workspaces_secret_and_all_of_another() -> None:
    def container(tracking: Json) -> Json:
        decision = conclude(ftj(NEW, data=SOURCE, tracking=tracking), settings=SETTINGS)
        containers: Json = decision.apply[1]["spec"]["template"]["spec"]["containers"][0]
        return containers

    workspace = container(
        {"uri": "databricks", "secretRef": {"name": "s"}, "trainerSecretRef": {"name": "t"}}
    )
    keys = [item["valueFrom"]["secretKeyRef"] for item in workspace["env"] if "valueFrom" in item]
    assert {key["name"] for key in keys} == {"t"}
    assert (len(keys), workspace["envFrom"]) == (4, [])
    other_container = container({"secretRef": {"name": "s"}, "trainerSecretRef": {"name": "t"}})
    assert [item["secretRef"]["name"] for item in other_container["envFrom"]] == ["t"]


def test_splits_that_are_given_need_no_preparation() -> None:
    decision = conclude(ftj())
    assert said(decision, ConditionType.PREPARED) == (
        "True",
        ConditionReason.SPLITS_GIVEN,
        "spec.data.splits names existing splits",
    )


def test_a_command_without_data_needs_no_preparation() -> None:
    decision = conclude(ftj(data=None, model=None, trainer={"command": ["torchrun", "t.py"]}))
    assert said(decision, ConditionType.PREPARED) == (
        "True",
        ConditionReason.NO_DATA,
        "spec.data is not set: your command reads its own data",
    )
    assert "Job/tune-train-1" in applied(decision)


AT_WORK: dict[str, tuple[list[Json], str]] = {
    "no pod yet": ([], "the prep pod is starting"),
    "a pod that is not ready": (
        [pod(JOB, ready=False, component=names.PREP)],
        "the prep pod is starting",
    ),
    "a pod at work": ([pod(JOB, component=names.PREP)], "Spark is running"),
}


@pytest.mark.parametrize(("pods", "what"), AT_WORK.values(), ids=AT_WORK)
def test_it_says_how_far_it_is(pods: list[Json], what: str) -> None:
    decision = prepare(child(JOB), pods=pods)
    message = f"{what}; kubectl logs job/tune-prep shows its progress"
    assert said(decision, ConditionType.PREPARED) == ("False", ConditionReason.PREPARING, message)
    assert (decision.status.phase, applied(decision)) == ("Preparing", [])


def test_its_result_becomes_the_status_and_training_starts_from_it() -> None:
    decision = prepare(child(JOB, "Complete"), pods=[prep_pod(0, 0, PREPARED)])
    assert decision.status.data == DataStatus(
        rows=RESULT.rows,
        tokens=RESULT.tokens,
        path="/data/splits",
        version=7,
        source_version=3,
        source_revision="c0ffee",
        feedback_version=9,
        columns=RESULT.columns,
        dropped=[
            Dropped(step="notNull", rows=4),
            Dropped(step="minQuality", rows=0),
            Dropped(step="dedupe", rows=6),
        ],
        redacted=[
            Redacted(kind="Email", values=7),
            Redacted(kind="Phone", values=0),
            Redacted(kind="Secret", values=1),
        ],
        evaluation_sets=RESULT.evaluation_sets,
    )
    assert said(decision, ConditionType.PREPARED) == (
        "True",
        ConditionReason.PREPARED,
        "/data/splits version 7: 90 train, 5 validation, 5 test rows; 10 dropped: 4 by notNull, 6 by dedupe; redacted: 7 Email, "
        "1 Secret",
    )
    assert applied(decision) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-1",
    ]
    recipe = yaml.safe_load(decision.apply[1]["data"]["recipe.yaml"])
    assert recipe["data"]["splits"] == {"type": "Delta", "path": "/data/splits", "version": 7}


DROPPED: dict[str, tuple[dict[str, int], int, str]] = {
    "nothing to drop": ({}, 0, ""),
    "nothing dropped": ({"dedupe": 0}, 1, ""),
    "one step": ({"limit": 7}, 1, "; 7 dropped: 7 by limit"),
    "more steps than there can be": (
        dict.fromkeys(map(str, range(40)), 0) | {"0": 1},
        MAX_DROPPED,
        "; 1 dropped: 1 by 0",
    ),
}


@pytest.mark.parametrize(("dropped", "count", "said_of_it"), DROPPED.values(), ids=DROPPED)
def test_what_steps_dropped_is_told(dropped: dict[str, int], count: int, said_of_it: str) -> None:
    result = TerminationMessage(prep=RESULT.model_copy(update={"dropped": dropped, "redacted": None}))
    decision = prepare(child(JOB, "Complete"), pods=[prep_pod(0, 0, result)])
    assert len(decision.status.data.dropped or []) == count
    reported = said(decision, ConditionType.PREPARED)
    assert reported is not None
    assert reported[2] == f"/data/splits version 7: 90 train, 5 validation, 5 test rows{said_of_it}"


def test_a_warning_of_the_preparation_stands_in_the_condition() -> None:
    warned: Json = {"warnings": ["dedupe.near drops 6 of 10 examples"], "dropped": {}, "redacted": None}
    result = TerminationMessage(prep=RESULT.model_copy(update=warned))
    decision = prepare(child(JOB, "Complete"), pods=[prep_pod(0, 0, result)])
    assert said(decision, ConditionType.PREPARED) == (
        "True",
        ConditionReason.PREPARED_WITH_WARNING,
        "dedupe.near drops 6 of 10 examples. /data/splits version 7: 90 train, 5 validation, 5 test rows",
    )


def test_a_result_that_went_with_its_pod_is_asked_for_again() -> None:
    lost = prepare(child(JOB, "Complete"), pods=[])
    assert deleted(lost) == [JOB]
    assert said(lost, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "the prep pod's result was lost with its node: the preparation runs again and finds the version that it wrote",
    )
    assert applied(prepare()) == ["ConfigMap/tune-prep", "Job/tune-prep"]


def test_a_pod_that_reports_nothing_is_not_asked_for_ever() -> None:
    decision = prepare(child(JOB, "Complete"), pods=[prep_pod(0, 0, "bye")])
    message = "pod tune-prep-0-abcde succeeded and reported no result: the image of spec.pods.prepare must run finetune-prep"
    assert said(decision, ConditionType.FAILED) == ("True", ConditionReason.PREPARATION_FAILED, message)
    assert deleted(decision) == []


def test_pods_of_an_earlier_preparation_are_waited_for_and_not_read() -> None:
    old = {**prep_pod(0, 0, PREPARED)}
    old["metadata"]["labels"]["batch.kubernetes.io/controller-uid"] = "earlier"
    stopping = pod(JOB, 1, owner="earlier", component=names.PREP)
    waiting = prepare(pods=[old, stopping])
    assert applied(waiting) == []
    assert said(waiting, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "the preparation waits for pod tune-prep-1-abcde to stop",
    )
    at_work = prepare(child(JOB), pods=[old])
    assert at_work.status.data is None


LOST_POD = lost(pod(JOB, 0, component=names.PREP, node="n"))


def test_a_preparation_that_is_lost_with_its_node_starts_again_elsewhere() -> None:
    ended_before = prep_pod(1, 1, error("Crash", "the JVM died"))
    decision = prepare(child(JOB), pods=[ended_before, LOST_POD])
    assert (deleted(decision), applied(decision)) == ([JOB], [])
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        f"pod tune-prep-0-abcde {LEFT.format('n')}; the preparation starts again",
    )
    assert decision.status.last_failure is not None
    assert (decision.status.last_failure.reason, decision.status.last_failure.node) == ("NodeLost", "n")
    freed = prepare(child(JOB, deletionTimestamp="t"), pods=[LOST_POD])
    assert (freed.delete, applied(freed)) == ((Deletion(JOB, f"uid-of-{JOB}", frees_name=True),), [])
    assert said(freed, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "the preparation waits for Job tune-prep to be deleted",
    )
    assert applied(prepare(pods=[LOST_POD])) == ["ConfigMap/tune-prep", "Job/tune-prep"]


FAILURES: dict[str, tuple[list[Json], str, str]] = {
    "wrong data": (
        [prep_pod(0, 65, error("MissingColumn", "there is no column answer"), node="node-1")],
        ConditionReason.DATA_WRONG,
        "preparation failed in pod tune-prep-0-abcde on node node-1: there is no column answer",
    ),
    "a wrong recipe": (
        [prep_pod(0, 64, error("BadFilter", "data.prepare.filter is no SQL"))],
        ConditionReason.RECIPE_WRONG,
        "preparation failed in pod tune-prep-0-abcde: data.prepare.filter is no SQL",
    ),
    "crashes, and the last one counts": (
        [
            prep_pod(2, 1, "first", at=1),
            prep_pod(1, 1, "second", at=2),
            prep_pod(0, 137, error("OutOfMemory", "raise data.prepare.spark.driverMemory"), at=3),
        ],
        ConditionReason.PREPARATION_FAILED,
        "preparation failed in pod tune-prep-0-abcde: raise data.prepare.spark.driverMemory",
    ),
    "wrong data after a crash": (
        [prep_pod(1, 1, "first", at=1), prep_pod(0, 65, error("NoRows", "no row is left"), at=2)],
        ConditionReason.DATA_WRONG,
        "preparation failed in pod tune-prep-0-abcde: no row is left",
    ),
    "no pod is left": ([], ConditionReason.PREPARATION_FAILED, "preparation failed: it was over"),
}


@pytest.mark.parametrize(("pods", "reason", "message"), FAILURES.values(), ids=FAILURES)
def test_it_fails(pods: list[Json], reason: str, message: str) -> None:
    decision = prepare(child(JOB, "Failed", "it was over"), pods=pods)
    assert failure_of(decision) == ("True", reason, message)
    assert said(decision, ConditionType.PREPARED) == ("False", reason, message)
    assert (decision.status.phase, applied(decision)) == ("Failed", [])


def test_a_retry_is_noted() -> None:
    decision = prepare(
        child(JOB),
        pods=[prep_pod(0, 1, error("Crash", "the JVM died")), pod(JOB, 1, component=names.PREP)],
    )
    assert decision.status.last_failure is not None
    assert decision.status.last_failure.to_json() == {
        "pod": "tune-prep-0-abcde",
        "rank": 0,
        "exitCode": 1,
        "reason": "Crash",
        "message": "the JVM died",
        "attempt": 0,
    }
    assert decision.status.phase == "Preparing"


def test_what_is_prepared_is_not_prepared_again() -> None:
    before = status(condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED))
    decision = conclude(ftj(before, data=SOURCE), observed(mlflow=tracked()), settings=SETTINGS)
    assert applied(decision) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-1",
    ]
