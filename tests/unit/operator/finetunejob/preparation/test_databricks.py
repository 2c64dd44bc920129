"""The preparation as a Databricks run: submitted, followed, repeated, canceled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, PrepResult, RunReport, TerminationMessage
from finetune_crds.env import LocalReference
from finetune_crds.status import FineTuneJobStatus, MlflowStatus, SplitCounts
from finetune_crds.status_parts import DatabricksRunStatus
from finetune_operator import names
from finetune_operator.databricks.model import Run
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide import decide_deletion
from finetune_operator.finetunejob.decide.failed_action import record_failed_action
from finetune_operator.finetunejob.decision import CancelRun, Decision, SubmitRun
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow, Observed, Preparation
from finetune_operator.finetunejob.preparation import databricks, databricks_submission
from finetune_operator.mlflow.model import Run as MlflowRun
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NO_MLFLOW,
    NOW,
    SOURCE,
    SPLITS,
    UID,
    conclude,
    condition,
    ftj,
    later,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
BACKEND = databricks.DatabricksBackend()
SETTINGS = dataclasses.replace(NO_MLFLOW, prep_wheels="/wheels")
DATABRICKS: Json = {"volume": "/Volumes/main/llm/work", "secretRef": {"name": "databricks"}}
DATA: Json = {
    "source": {"type": "Delta", "table": "main.llm.chats"},
    "prepare": {
        "output": "s3://lake/splits",
        "spark": {"mode": "Databricks", "databricks": DATABRICKS},
    },
}
PAGE = "https://w/?o=1#job/0/run/12"
NAME = f"finetune-prep team/tune {UID} 1"
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
RESULT = PrepResult(
    rows=SplitCounts(train=90),
    tokens=SplitCounts(train=900),
    path="s3://lake/splits",
    version=7,
    source_version=3,
)
DONE = RunReport(exit_code=0, message=TerminationMessage(prep=RESULT))
AWAY = Problem(
    ConditionReason.DATABRICKS_UNREACHABLE, "Databricks at https://w cannot be reached: the request timed out"
)


def run(
    state: str = "Running", *, run_id: str | None = "12", attempt: int = 1, failures: int = 0, **more: Any
) -> Json:
    return {"attempt": attempt, "failures": failures, "state": state, "run_id": run_id, **more}


def the_job(
    run_status: Json | None, *, has_finalizer: bool = True, deleting: bool = False, suspend: bool = False
) -> FineTuneJob:
    """The job with a run in its status."""
    before: FineTuneJobStatus = status(
        ACCEPTED, ADMITTED, *([PREPARING] if run_status else []), start_time=NOW
    )
    if run_status:
        before = before.model_copy(update={"databricks_run": DatabricksRunStatus(**run_status)})
    env = [{"name": "TOKEN", "value": "secret"}]
    job = ftj(before, data=DATA, model={"base": "org/model"}, pods={"all": {"env": env}}, suspend=suspend)
    return dataclasses.replace(
        job, finalizers=(names.RUN_FINALIZER,) if has_finalizer else (), deleting=deleting
    )


def failed(code: int, reason: str = "MissingColumn", message: str = "it has no column answer") -> RunReport:
    return RunReport(
        exit_code=code, message=TerminationMessage(error=PodError(reason=reason, message=message))
    )


def seen(word: Any, **more: Any) -> Preparation:
    return Preparation(run=Run("12", word, PAGE, **more))


def decided(run_status: Json | None, preparation: Preparation | None = None, **parts: Any) -> Decision:
    return conclude(
        the_job(run_status, **parts), Observed(preparation=preparation), at=later(5), settings=SETTINGS
    )


def summary(decision: Decision) -> tuple[Any, ...]:
    """The run of the status, what is done, whether there is a finalizer to be, and the reason of Prepared and of Failed."""
    databricks_run = decision.status.databricks_run
    reasons = [
        reported[1] if (reported := said(decision, kind)) else ""
        for kind in (ConditionType.PREPARED, ConditionType.FAILED)
    ]
    return (
        (databricks_run.attempt, databricks_run.failures, databricks_run.state, databricks_run.run_id)
        if databricks_run
        else None,
        [type(item).__name__ for item in decision.actions],
        decision.finalizer,
        *reasons,
    )


STEPS: dict[str, tuple[Json | None, Preparation | None, Json, tuple[Any, ...]]] = {
    "the attempt is written first": (None, None, {"has_finalizer": False}, ((1, 0, "Submitting", None), [], True, "Preparing", "")),
    "nothing is submitted without the finalizer": (
        run("Submitting", run_id=None), None, {"has_finalizer": False}, ((1, 0, "Submitting", None), [], True, "Preparing", ""),
    ),
    "then the run": (
        run("Submitting", run_id=None), None, {}, ((1, 0, "Submitting", None), ["SubmitRun"], None, "Preparing", ""),
    ),
    "it ends by itself": (run(), seen("Canceling"), {}, ((1, 0, "Running", "12"), [], None, "Preparing", "")),
    "it waits": (run("Pending"), seen("Pending"), {}, ((1, 0, "Pending", "12"), [], None, "Preparing", "")),
    "it runs": (run("Pending"), seen("Running"), {}, ((1, 0, "Running", "12"), [], None, "Preparing", "")),
    "the workspace is away": (
        run(), Preparation(problem=AWAY), {}, ((1, 0, "Running", "12"), [], None, "DatabricksUnreachable", ""),
    ),
    "the recipe is wrong": (
        run(), seen("Failed", report=failed(64)), {}, ((1, 0, "Failed", "12"), [], False, "RecipeWrong", "RecipeWrong"),
    ),
    "the data are wrong": (
        run(), seen("Failed", report=failed(65)), {}, ((1, 0, "Failed", "12"), [], False, "DataWrong", "DataWrong"),
    ),
    "it fails for another reason": (
        run(), seen("Failed", report=failed(1)), {}, ((2, 1, "Submitting", None), [], None, "Preparing", ""),
    ),
    "its driver is lost": (
        run(failures=1, attempt=2), seen("Failed", message="driver lost"), {},
        ((3, 2, "Submitting", None), [], None, "Preparing", ""),
    ),
    "it fails for the third time": (
        run(failures=2, attempt=3), seen("Failed", message="driver lost"), {},
        ((3, 2, "Failed", "12"), [], False, "PreparationFailed", "PreparationFailed"),
    ),
    "its compute is wrong": (
        run(), seen("Failed", message="no such node type", is_final=True), {},
        ((1, 0, "Failed", "12"), [], False, "RunRefused", "RunRefused"),
    ),
    "it leaves no report": (run(), seen("Succeeded"), {}, ((2, 1, "Submitting", None), [], None, "Preparing", "")),
    "it is canceled by hand": (
        run(), seen("Canceled"), {}, ((1, 0, "Canceled", "12"), [], False, "RunCanceled", "RunCanceled"),
    ),
    "it was canceled for a suspension": (
        run("Canceling"), seen("Canceled"), {}, ((1, 0, "Canceled", "12"), [], False, "Preparing", ""),
    ),
    "its cancellation takes a while": (
        run("Canceling"), seen("Canceling"), {}, ((1, 0, "Canceling", "12"), [], None, "Preparing", ""),
    ),
    "suspended": (
        run(), seen("Running"), {"suspend": True}, ((1, 0, "Canceling", "12"), ["CancelRun"], None, "Preparing", ""),
    ),
    "suspended, and ending": (
        run("Canceling"), seen("Canceling"), {"suspend": True}, ((1, 0, "Canceling", "12"), [], None, "Preparing", ""),
    ),
    "suspended, and ended": (
        run("Canceling"), seen("Canceled"), {"suspend": True}, ((1, 0, "Canceled", "12"), [], False, "Preparing", ""),
    ),
    "suspended after it succeeded": (
        run(), seen("Succeeded", report=DONE), {"suspend": True}, ((1, 0, "Succeeded", "12"), [], False, "Preparing", ""),
    ),
    "suspended while it was submitted": (
        run("Submitting", run_id=None), None, {"suspend": True},
        ((1, 0, "Submitting", None), ["CancelRun"], None, "Preparing", ""),
    ),
    "suspended before it was submitted": (
        run("Submitting", run_id=None), None, {"suspend": True, "has_finalizer": False},
        ((1, 0, "Canceled", None), [], None, "Preparing", ""),
    ),
    "resumed": (run("Canceled"), None, {"has_finalizer": False}, ((2, 0, "Submitting", None), [], True, "Preparing", "")),
}  # fmt: skip


@pytest.mark.parametrize(("run_status", "preparation", "parts", "expected"), STEPS.values(), ids=STEPS)
def test_steps(
    run_status: Json | None, preparation: Preparation | None, parts: Json, expected: tuple[Any, ...]
) -> None:
    assert summary(decided(run_status, preparation, **parts)) == expected


def test_what_is_submitted() -> None:
    (action,) = decided(run("Submitting", run_id=None)).actions
    assert isinstance(action, SubmitRun)
    submission = action.submission
    assert (submission.name, submission.volume, submission.folder) == (
        NAME,
        "/Volumes/main/llm/work",
        "/Volumes/main/llm/work/jobs/team-tune-0f1e2d3c/1",
    )
    assert submission.token.startswith(f"{UID}-")
    assert submission.token.endswith("-1")
    assert len(submission.token) <= 64
    recipe = yaml.safe_load(submission.recipe)
    assert recipe["data"]["source"]["table"] == "main.llm.chats"
    assert "secret" not in submission.recipe.replace("secretRef", "")
    (again,) = decided(run("Submitting", run_id=None, attempt=2)).actions
    assert isinstance(again, SubmitRun)
    assert again.submission.token != submission.token


def test_a_run_waits_for_the_mlflow_run_and_learns_its_id_and_its_workspace() -> None:
    settings = dataclasses.replace(SETTINGS, tracking_uri="databricks")
    waiting = conclude(the_job(None, has_finalizer=False), Observed(mlflow=Mlflow()), settings=settings)
    assert (waiting.status.databricks_run, [type(item).__name__ for item in waiting.actions]) == (
        None,
        ["EnsureRun"],
    )
    assert said(waiting, ConditionType.PREPARED) == (
        "False",
        "Preparing",
        "preparation starts when the MLflow run exists",
    )
    with_run = dataclasses.replace(tracked(), server="https://w")
    submissions = []
    for mlflow in (with_run, Mlflow(problem=AWAY)):
        observation = Observed(mlflow=mlflow)
        decision = conclude(the_job(run("Submitting", run_id=None)), observation, settings=settings)
        (action,) = decision.actions
        assert isinstance(action, SubmitRun)
        submissions.append((action.submission.mlflow_run, action.submission.mlflow_host))
    assert submissions == [("r1", "https://w"), ("", "")]
    # MLflow has not answered yet.
    for unread in (the_job(None), the_job(run("Submitting", run_id=None))):
        waiting = conclude(unread, Observed(), settings=settings)
        assert [type(item).__name__ for item in waiting.actions] == ["EnsureRun"]
        assert said(waiting, ConditionType.PREPARED) == (
            "False",
            "Preparing",
            "preparation waits for an answer of MLflow",
        )


@pytest.mark.parametrize("run_status", [None, run("Submitting", run_id=None)], ids=["begins", "submits"])
@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "not found"])
def test_it_waits_for_the_mlflow_run_that_replaces_one(run_status: Json | None, *, deleted: bool) -> None:
    deleted_run = MlflowRun("r1", "e1", "RUNNING", is_deleted=True) if deleted else None
    job, settings = the_job(run_status), dataclasses.replace(SETTINGS, tracking_uri="http://mlflow:5000")
    logged = MlflowStatus(experiment_id="e1", run_id="r1")
    job = dataclasses.replace(job, status=job.status.model_copy(update={"mlflow": logged}))
    decision = conclude(job, Observed(mlflow=Mlflow(run=deleted_run)), settings=settings)
    assert [item for item in decision.actions if isinstance(item, SubmitRun)] == []
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        "Preparing",
        "preparation starts when the MLflow run exists",
    )


def test_the_result_goes_to_the_status_and_training_starts() -> None:
    decision = decided(run(), seen("Succeeded", report=DONE))
    data, links = decision.status.data, decision.status.links
    assert data
    assert (data.path, data.version, data.source_version) == ("s3://lake/splits", 7, 3)
    assert links
    assert links.preparation == PAGE
    assert [body["kind"] for body in decision.apply] == ["Service", "ConfigMap", "NetworkPolicy", "Job"]
    assert decision.finalizer is False


def test_a_report_that_is_too_large_is_named() -> None:
    message = "report.json is larger than 65536 bytes"
    decision = decided(run(), seen("Succeeded", message=message))
    assert decision.status.last_failure is not None
    assert decision.status.last_failure.message == message


def test_the_step_is_shown() -> None:
    progress = decided(run(), seen("Running", progress="writing 40%")).status.progress
    assert progress
    assert progress.summary == "writing 40%"


SENTENCES: dict[str, tuple[Json, Preparation, str]] = {
    "running": (run(), seen("Running"), f"Databricks run 12 is running; see {PAGE}"),
    "pending": (run("Pending"), seen("Pending"), f"Databricks run 12 waits for its compute; see {PAGE}"),
    "away": (
        run(), Preparation(problem=AWAY), f"Databricks run 12 continues, but the operator cannot read its state: {AWAY.message}",
    ),
    "canceled": (
        run(), seen("Canceled"),
        f"Databricks run 12 ({PAGE}) was canceled in the workspace: create a FineTuneJob with another name to prepare "
        "again; to pause a job, set spec.suspend",
    ),
    "wrong data": (
        run(), seen("Failed", report=failed(65)),
        f"preparation failed in Databricks run 12 ({PAGE}): it has no column answer",
    ),
    "again": (
        run(), seen("Failed", message="driver lost"),
        f"Databricks run 12 ({PAGE}) failed (driver lost): a Databricks run is about to be submitted",
    ),
    "for the last time": (
        run(failures=2), seen("Failed", message="driver lost"), f"Databricks run 12 ({PAGE}) failed, like the 2 runs before it: driver lost",
    ),
    "wrong compute": (
        run(), seen("Failed", message="no such node type", is_final=True),
        f"Databricks run 12 ({PAGE}) failed permanently: no such node type",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run_status", "preparation", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_sentences(run_status: Json, preparation: Preparation, sentence: str) -> None:
    reported = said(decided(run_status, preparation), ConditionType.PREPARED)
    assert reported
    assert reported[2] == sentence


def test_a_deadline_cancels_the_run() -> None:
    job = the_job(run())
    assert job.spec
    policy = job.spec.run_policy.model_copy(update={"active_deadline_seconds": 1})
    job = dataclasses.replace(job, spec=job.spec.model_copy(update={"run_policy": policy}))
    decision = conclude(job, Observed(preparation=seen("Running")), at=later(5), settings=SETTINGS)
    assert summary(decision)[:3] == ((1, 0, "Canceling", "12"), ["CancelRun"], None)
    assert decision.status.phase == "Failed"


def test_the_mlflow_run_is_closed_before_a_workspace_is_asked_that_may_be_away() -> None:
    job = the_job(run())
    finished = job.status.model_copy(
        update={
            "conditions": [
                *job.status.conditions,
                condition(ConditionType.FAILED, "True", ConditionReason.RECIPE_WRONG),
            ],
            "completion_time": NOW,
            "mlflow": MlflowStatus(experiment_id="e1", run_id="r1"),
        }
    )
    observed = Observed(preparation=seen("Running"), mlflow=tracked())
    decision = conclude(dataclasses.replace(job, status=finished), observed, at=later(5), settings=SETTINGS)
    assert [type(item).__name__ for item in decision.actions] == ["FinishRun", "CancelRun"]


DELETIONS: dict[str, tuple[Json, Preparation | None, tuple[Any, ...]]] = {
    "at work": (run(), seen("Running"), ("Canceling", [CancelRun(NAME, "12")], None)),
    "ending": (run("Canceling"), seen("Canceling"), ("Canceling", [], None)),
    "ended": (run("Canceling"), seen("Canceled"), ("Canceled", [], False)),
    "not known yet": (run("Submitting", run_id=None), None, ("Submitting", [CancelRun(NAME)], None)),
    "away": (run(), Preparation(problem=AWAY), ("Canceling", [], None)),
    "without a Secret": (
        run(), Preparation(problem=Problem(ConditionReason.CREDENTIALS_MISSING, "no Secret")), ("Running", [], False),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run_status", "preparation", "expected"), DELETIONS.values(), ids=DELETIONS)
def test_deletion(run_status: Json, preparation: Preparation | None, expected: tuple[Any, ...]) -> None:
    decision = decide_deletion(
        the_job(run_status, deleting=True), Observed(preparation=preparation), later(5), SETTINGS
    )
    databricks_run = decision.status.databricks_run
    assert databricks_run
    assert (databricks_run.state, [*decision.actions], decision.finalizer) == expected


def test_a_run_that_is_canceled_by_hand_is_not_submitted_again() -> None:
    run_status = run()
    for word in ("Running", "Canceling", "Canceled"):
        decision = decided(run_status, seen(word))
        assert decision.status.databricks_run
        run_status = decision.status.databricks_run.model_dump()
    assert summary(decision) == ((1, 0, "Canceled", "12"), [], False, "RunCanceled", "RunCanceled")


def test_a_job_whose_spec_cannot_be_read_says_what_holds_it() -> None:
    job = dataclasses.replace(the_job(run(), deleting=True), spec=None, invalid="spec.method: unknown")
    decision = decide_deletion(job, Observed(), later(5), SETTINGS)
    reported = said(decision, ConditionType.PREPARED)
    assert (reported and reported[1:], decision.finalizer) == (
        (
            "SpecUnreadable",
            "this version of the operator cannot read the spec (spec.method: unknown), so the operator cannot "
            "cancel the Databricks run: cancel the run in the workspace and remove the finalizer "
            f"{names.RUN_FINALIZER}, or install a version of the operator that can read the spec",
        ),
        None,
    )


def test_the_recipe_in_the_volume_has_no_variables() -> None:
    job = the_job(run("Submitting", run_id=None))
    cluster = {"sparkVersion": "17.3.x-scala2.13", "nodeType": "m", "env": {"HF_TOKEN": "hf_secret"}}
    databricks_fields = DATABRICKS | {"compute": {"type": "NewCluster", "newCluster": cluster}}
    prepare = DATA["prepare"] | {"spark": {"mode": "Databricks", "databricks": databricks_fields}}
    data = DATA | {"prepare": prepare}
    job = dataclasses.replace(job, spec=ftj(data=data, model={"base": "org/model"}).spec)
    (action,) = conclude(job, Observed(), at=later(5), settings=SETTINGS).actions
    assert isinstance(action, SubmitRun)
    assert "hf_secret" not in action.submission.recipe
    assert action.submission.compute.new_cluster
    assert action.submission.compute.new_cluster.env == {"HF_TOKEN": "hf_secret"}


def test_deletion_says_what_it_waits_for() -> None:
    decision = decide_deletion(
        the_job(run(), deleting=True), Observed(preparation=Preparation(problem=AWAY)), later(5), SETTINGS
    )
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        "DatabricksUnreachable",
        f"deletion is waiting for Databricks, to cancel run 12: {AWAY.message}; to delete the job and let the run continue, remove the "
        "finalizer finetune.dev/cancel-run",
    )


NOTED: dict[str, tuple[list[Any], str | None, tuple[Any, ...]]] = {
    "submitted": ([SubmitRun], "12", ("Pending", "12")),
    "found and canceled": ([CancelRun], "12", ("Canceling", "12")),
    "not found": ([CancelRun], None, ("Canceled", None)),
}


@pytest.mark.parametrize(("kinds", "run_id", "expected"), NOTED.values(), ids=NOTED)
def test_what_an_action_brings_is_noted(
    kinds: list[Any], run_id: str | None, expected: tuple[Any, ...]
) -> None:
    parts: Json = {"suspend": kinds == [CancelRun]}
    decision = decided(run("Submitting", run_id=None), **parts)
    assert [type(item) for item in decision.actions] == kinds
    databricks_run = BACKEND.record_run(decision, run_id).status.databricks_run
    assert databricks_run
    assert (databricks_run.state, databricks_run.run_id) == expected


def test_a_run_that_the_workspace_refuses_fails_the_job() -> None:
    job = the_job(run("Submitting", run_id=None))
    decision = decided(run("Submitting", run_id=None))
    refused = Problem(ConditionReason.RUN_REFUSED, "Databricks refuses the run: Cluster a does not exist")
    after = record_failed_action(job, decision, decision.actions[0], refused, now=later(5))
    assert (after.status.phase, said(after, ConditionType.PREPARED)) == (
        "Failed",
        ("False", "RunRefused", refused.message),
    )
    forbidden = Problem(ConditionReason.DATABRICKS_FORBIDDEN, "grant it")
    after = record_failed_action(job, decision, decision.actions[0], forbidden, now=later(5))
    assert (after.status.phase, said(after, ConditionType.PREPARED)) == (
        "Preparing",
        ("False", "DatabricksForbidden", "grant it"),
    )


def test_a_job_whose_login_never_worked_may_go() -> None:
    forbidden = Problem(ConditionReason.DATABRICKS_FORBIDDEN, "grant it")
    unknown, submitted_run = run("Submitting", run_id=None), run()
    outcomes = [
        BACKEND.may_release(the_job(item), problem)
        for item in (unknown, submitted_run)
        for problem in (forbidden, AWAY)
    ]
    assert outcomes == [True, False, False, False]


def prepared_in(mode: str) -> Json:
    return {**SOURCE, "prepare": {**SOURCE["prepare"], "spark": {"mode": mode}}}


OTHERS = {mode: prepared_in(mode) for mode in ("Local", "Kubernetes", "SparkApplication")} | {
    "splits": SPLITS
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("deleting", [False, True], ids=["at work", "being deleted"])
def test_another_mode_has_no_finalizer(data: Json, *, deleting: bool) -> None:
    job = ftj(status(ACCEPTED, ADMITTED, start_time=NOW), data=data, suspend=deleting)
    job = dataclasses.replace(job, deleting=deleting)
    decision = conclude(job, at=later(5), settings=SETTINGS)
    assert (decision.finalizer, decision.status.databricks_run) == (None, None)


WRONG: dict[str, tuple[Json, Settings, list[str]]] = {
    "nothing": ({"data": DATA}, SETTINGS, []),
    "another mode": ({}, SETTINGS, []),
    "the installation's storage is a volume of pods": (
        {"data": {**DATA, "prepare": {**DATA["prepare"], "output": "/splits"}}},
        SETTINGS,
        ["spec.data.prepare.output /splits is a folder of the pods, which a Databricks run cannot write: use s3://bucket/folder"],
    ),
    "a job of an earlier version": (
        {"data": {**DATA, "prepare": {**DATA["prepare"], "spark": {"mode": "Databricks"}}}},
        SETTINGS,
        ["spec.data.prepare.spark.databricks.volume is missing: set it to a folder of a Unity Catalog volume for the operator's wheel"],
    ),
    "a model of another registry": (
        {"data": DATA, "model": {"base": "models:/m@champion"}},
        SETTINGS,
        [
            "a Databricks run cannot read the tokenizer of models:/m@champion from this cluster's MLflow: set "
            "spec.tracking.uri to databricks, or use a model of the Hub"
        ],
    ),
    "a model of the workspace": (
        {"data": DATA, "model": {"base": "models:/a.b.c@champion"}},
        dataclasses.replace(SETTINGS, tracking_uri="databricks"),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "settings", "expected"), WRONG.values(), ids=WRONG)
def test_mistakes(parts: Json, settings: Settings, expected: list[str]) -> None:
    spec = ftj(**parts).spec
    assert spec
    assert [*BACKEND.find_mistakes(spec, settings)] == expected


def test_it_waits_for_an_operator_with_a_wheel() -> None:
    reported = said(conclude(ftj(data=DATA), settings=NO_MLFLOW), ConditionType.ACCEPTED)
    assert reported == ("False", "DatabricksNotConfigured", databricks.NO_WHEEL)


LOGINS: dict[str, tuple[Json, Json, str | None]] = {
    "its own": (DATABRICKS, {"uri": "databricks", "secretRef": {"name": "other"}}, "databricks"),
    "that of its run": (
        {"volume": "/Volumes/a/b/c"}, {"uri": "databricks", "secretRef": {"name": "other"}}, "other",
    ),
    "not that of another server": (
        {"volume": "/Volumes/a/b/c"}, {"uri": "http://m", "secretRef": {"name": "other"}}, None,
    ),
}  # fmt: skip


def with_login(databricks_fields: Json, **spark: Any) -> Json:
    """The data of a preparation on Databricks with these settings."""
    return {
        **DATA,
        "prepare": {
            **DATA["prepare"],
            "spark": {"mode": "Databricks", "databricks": databricks_fields, **spark},
        },
    }


@pytest.mark.parametrize(("databricks_fields", "tracking", "expected"), LOGINS.values(), ids=LOGINS)
def test_logins(databricks_fields: Json, tracking: Json, expected: str | None) -> None:
    reference = databricks_submission.find_login(
        ftj(data=with_login(databricks_fields), tracking=tracking), SETTINGS
    )
    assert (reference.name if reference else None) == expected


def test_a_secret_that_may_be_missing_gives_no_login_of_the_installation() -> None:
    databricks_fields = {"volume": "/Volumes/a/b/c", "secretRef": {"name": "mine", "optional": True}}
    assert databricks_submission.find_login(
        ftj(data=with_login(databricks_fields)), SETTINGS
    ) == LocalReference(name="mine")


NO_OWN_LOGIN: Json = {"volume": "/Volumes/main/llm/work"}
LISTED = dataclasses.replace(SETTINGS, databricks_namespaces=("other", "team"))
NOT_LISTED = dataclasses.replace(SETTINGS, databricks_namespaces=("other",))
FORBIDDEN = (
    "jobs of namespace team are not allowed to run on Databricks as the service principal that the chart "
    "configures: create a FineTuneJob with another name that sets spec.data.prepare.spark.databricks.secretRef, or add "
    "the namespace to databricks.namespaces of the chart"
)
# The login that the job names, the installation, and the reason of Accepted with its message.
PERMISSIONS: dict[str, tuple[Json, Settings, tuple[str, str]]] = {
    "its own login": (DATABRICKS, NOT_LISTED, ("Accepted", "the spec can be run")),
    "none": (NO_OWN_LOGIN, SETTINGS, ("DatabricksForbidden", FORBIDDEN)),
    "none, and others are listed": (NO_OWN_LOGIN, NOT_LISTED, ("DatabricksForbidden", FORBIDDEN)),
    "none, and its namespace is listed": (NO_OWN_LOGIN, LISTED, ("Accepted", "the spec can be run")),
}


@pytest.mark.parametrize(("databricks_fields", "settings", "expected"), PERMISSIONS.values(), ids=PERMISSIONS)
def test_who_may_run_as_the_installation(
    databricks_fields: Json, settings: Settings, expected: tuple[str, str]
) -> None:
    decision = conclude(
        ftj(data=with_login(databricks_fields), model={"base": "org/model"}), settings=settings
    )
    accepted = said(decision, ConditionType.ACCEPTED)
    assert accepted is not None
    assert accepted[1:] == expected


CLUSTER: Json = {
    "sparkVersion": "17.3.x-scala2.13",
    "nodeType": "i3.xlarge",
    "env": {"HF_TOKEN": "{{secrets/hub/token}}", "MODE": "fast"},
}
CONF = {"spark.hadoop.fs.s3a.secret.key": "{{ secrets/lake/key }}"}
WOULD_READ = (
    "and the chart's service principal would read the secret instead of you: set "
    "spec.data.prepare.spark.databricks.secretRef to a Secret with your own Databricks credentials"
)
BOTH = [
    f"spec.data.prepare.spark.databricks.compute.newCluster.env refers to a secret of the workspace in HF_TOKEN, {WOULD_READ}",
    f"spec.data.prepare.spark.conf refers to a secret of the workspace in spark.hadoop.fs.s3a.secret.key, {WOULD_READ}",
]


@pytest.mark.parametrize(
    ("databricks_fields", "expected"), [(DATABRICKS, []), (NO_OWN_LOGIN, BOTH)], ids=["own", "none"]
)
def test_secrets_of_the_workspace_need_a_login_of_the_namespace(
    databricks_fields: Json, expected: list[str]
) -> None:
    compute = {"type": "NewCluster", "newCluster": CLUSTER}
    spec = ftj(data=with_login({**databricks_fields, "compute": compute}, conf=CONF)).spec
    assert spec
    assert [*BACKEND.find_mistakes(spec, LISTED)] == expected
