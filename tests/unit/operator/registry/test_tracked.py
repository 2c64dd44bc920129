"""A job's run and version in a Databricks workspace, through MLflow's own client and the SDK, against the stand-in."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.tracking import Tracking
from finetune_operator.errors import ExternalError
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.registry.tracked import Tracked, open_tracked
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace

MODEL = "main.llm.support"
TRACKING = Tracking(uri="databricks")
TAGS = {"finetune.dev/uid": "u1"}


@pytest.fixture(autouse=True)
def with_runs(databricks: Workspace) -> None:
    databricks.tracking.open()


def opened(state: Workspace, **credentials: str) -> Tracked:
    secret = {"DATABRICKS_HOST": state.uri} | credentials if credentials else state.secret
    tracked = open_tracked(Settings(), TRACKING, secret)
    assert tracked
    return tracked


def test_the_run_of_a_job(databricks: Workspace) -> None:
    server = opened(databricks).server
    assert server.find_run("u1", "/Shared/team") is None
    created = server.ensure_run("u1", "/Shared/team", "tune", TAGS)
    assert server.ensure_run("u1", "/Shared/team", "tune", TAGS).run_id == created.run_id
    server.finish_run(created.run_id, "FINISHED")
    run = server.find_run("u1", "/Shared/team", created.run_id)
    assert run == Run(created.run_id, created.experiment_id, "FINISHED", {}, run.tags if run else {})
    assert run.tags["finetune.dev/uid"] == "u1"


def test_an_experiment_in_a_folder_that_does_not_exist(databricks: Workspace) -> None:
    with pytest.raises(ExternalError) as raised:
        opened(databricks).server.ensure_run("u1", "/Nowhere/team", "tune", TAGS)
    assert str(raised.value) == (
        f"experiment /Nowhere/team cannot be created at {databricks.uri} because its folder does not exist: create "
        "the folder, or create a FineTuneJob with another name and another spec.tracking.experiment"
    )


def test_the_version_of_a_run(databricks: Workspace) -> None:
    registry = opened(databricks).registry()
    assert registry.find_version(MODEL, "r1", ["candidate"]) is None
    for number, run in ((1, "r0"), (2, "r1"), (3, "r1"), (4, "r1")):
        databricks.add_version(MODEL, number)
        databricks.models[MODEL].versions[number].run_id = run
    databricks.models[MODEL].versions[4].status = "PENDING_REGISTRATION"
    databricks.set_alias(MODEL, "Candidate", 3)
    databricks.set_alias(MODEL, "champion", 2)
    registry.set_tags(MODEL, "3", {"eval_f1": "0.5"})
    version = registry.find_version(MODEL, "r1", ["candidate", "champion"])
    assert version == RegisteredVersion(MODEL, "3", frozenset({"candidate"}), {"eval_f1": "0.5"})


def test_metrics_of_a_run(databricks: Workspace) -> None:
    server = opened(databricks).server
    created = server.ensure_run("u1", "/Shared/team", "tune", TAGS)
    server.log_metrics(created.run_id, {"eval_f1": 0.5, "eval_bleu": 40.0}, 41)
    run = server.find_run("u1", "/Shared/team")
    assert run is not None
    assert run.metrics == {"eval_f1": 0.5, "eval_bleu": 40.0}


def test_the_login_of_a_service_principal(databricks: Workspace) -> None:
    credentials = {"DATABRICKS_CLIENT_ID": "principal", "DATABRICKS_CLIENT_SECRET": "principal-secret"}
    tracked = opened(databricks, **credentials)
    tracked.server.ensure_run("u1", "/Shared/team", "tune", TAGS)
    databricks.revoke()
    with pytest.raises(ExternalError) as raised:
        opened(databricks, **credentials).server.find_run("u1", "/Shared/team")
    assert raised.value.problem.reason == ConditionReason.MLFLOW_FORBIDDEN
    tracked.refused(raised.value)
    assert opened(databricks, **credentials).server.find_run("u1", "/Shared/team")


def test_a_workspace_that_is_not_known() -> None:
    with pytest.raises(ExternalError) as raised:
        open_tracked(Settings(), TRACKING, None)
    assert raised.value.problem.reason == ConditionReason.DATABRICKS_NOT_CONFIGURED
