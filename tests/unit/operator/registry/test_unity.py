"""Models in Unity Catalog, with the real SDK against the stand-in workspace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from databricks.sdk import WorkspaceClient

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.workspace import open_workspace
from finetune_operator.errors import ExternalError
from finetune_operator.registry import unity
from finetune_operator.registry.base import ModelVersion, RegisteredModel, Registry
from finetune_operator.registry.unity import UnityRegistry, find_metastore
from finetune_operator.registry.writer import build_lease_name
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Fault, Workspace

MODEL = "main.llm.support"
METASTORE = "/api/2.1/unity-catalog/current-metastore-assignment"


def registry(state: Workspace) -> Registry:
    return UnityRegistry(client(state))


def client(state: Workspace) -> WorkspaceClient:
    return open_workspace(state.secret, Settings())


def problem(call: Callable[[], object]) -> tuple[ConditionReason, str]:
    with pytest.raises(ExternalError) as raised:
        call()
    return raised.value.problem.reason, raised.value.problem.message


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    unity._metastores.clear()
    yield
    unity._metastores.clear()


def test_it_is_named_by_its_metastore(databricks: Workspace) -> None:
    databricks.metastore = "11ab-22cd"
    for _ in range(2):
        assert UnityRegistry.of(client(databricks)).uri == "databricks-uc://11ab-22cd"
    assert databricks.asked == [("GET", METASTORE)]


def test_it_is_named_by_its_workspace_where_nobody_may_know_the_metastore(databricks: Workspace) -> None:
    databricks.denied = {f"GET {METASTORE}"}
    assert UnityRegistry.of(client(databricks)).uri == databricks.uri.replace("http", "databricks-uc")
    databricks.denied = set()
    assert find_metastore(client(databricks), fetch=False) is None
    assert UnityRegistry.of(client(databricks)).uri == "databricks-uc://metastore-1"
    assert find_metastore(client(databricks), fetch=False) == "metastore-1"


def test_a_workspace_that_does_not_say_its_metastore_now(databricks: Workspace) -> None:
    databricks.faults.append(Fault(503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "wait"}))
    assert problem(lambda: UnityRegistry.of(client(databricks))) == (
        ConditionReason.DATABRICKS_UNREACHABLE,
        f"Databricks at {databricks.uri} is too busy to read which metastore the workspace is attached to: TEMPORARILY_UNAVAILABLE, HTTP 503",
    )


def test_the_lease_of_a_model_is_the_same_however_its_name_is_written() -> None:
    assert build_lease_name("databricks-uc://m", "Main.LLM.Support") == build_lease_name(
        "databricks-uc://m", MODEL
    )
    assert build_lease_name("http://mlflow:5000", "Support") != build_lease_name(
        "http://mlflow:5000", "support"
    )


def test_a_model_and_its_aliases(databricks: Workspace) -> None:
    unity = registry(databricks)
    assert unity.model(MODEL) is None
    databricks.add_version(MODEL, 1)
    databricks.add_version(MODEL, 2)
    assert unity.model(MODEL) == RegisteredModel(MODEL, {})
    unity.set_alias(MODEL, "champion", "1")
    unity.set_alias(MODEL, "champion", "2")
    unity.set_alias(MODEL, "candidate", "1")
    assert unity.model(MODEL) == RegisteredModel(MODEL, {"champion": "2", "candidate": "1"})
    unity.delete_alias(MODEL, "champion")
    unity.delete_alias(MODEL, "champion")
    assert unity.model(MODEL) == RegisteredModel(MODEL, {"candidate": "1"})


def test_an_alias_has_one_version_for_all_spellings(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    unity = registry(databricks)
    unity.set_alias(MODEL, "Champion", "1")
    model = unity.model(MODEL)
    assert model
    assert (model.holder("champion"), model.holder("CHAMPION"), model.holder("candidate")) == ("1", "1", None)


def test_a_version(databricks: Workspace) -> None:
    unity = registry(databricks)
    assert unity.version(MODEL, "1") is None
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5}, {"finetune_eval_data": "d1"})
    assert unity.version(MODEL, "2") is None
    unity.set_tags(MODEL, "1", {"reviewed": "yes", "by": "ana"})
    assert unity.version(MODEL, "1") == ModelVersion(
        version="1",
        run_id=f"run-{MODEL}-1",
        tags={"reviewed": "yes", "by": "ana"},
        metrics={"eval_loss": 1.5},
        evaluated_on="d1",
    )


def test_numbers_of_the_logged_model_come_before_those_of_the_run(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5, "step": 10})
    databricks.models[MODEL].versions[1].metrics = {"eval_loss": 1.25}
    version = registry(databricks).version(MODEL, "1")
    assert version
    assert (version.metrics, version.unread) == ({"eval_loss": 1.25, "step": 10}, "")


def test_the_run_of_another_workspace_is_not_read(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5}, {"finetune_eval_data": "d1"})
    version = databricks.models[MODEL].versions[1]
    version.workspace_id, version.metrics = "99", {"accuracy": 0.5}
    assert registry(databricks).version(MODEL, "1") == ModelVersion(
        version="1",
        run_id=f"run-{MODEL}-1",
        metrics={"accuracy": 0.5},
        unread="the run is in workspace 99, but the credentials are for workspace 1234",
    )


def test_when_a_model_and_its_version_were_created(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    databricks.models[MODEL].created = 1_782_864_000_123
    model, version = registry(databricks).model(MODEL), registry(databricks).version(MODEL, "1")
    assert model
    assert version
    assert (model.created, version.created) == (
        datetime(2026, 7, 1, 0, 0, 0, 123000, tzinfo=UTC),
        datetime(2026, 7, 1, tzinfo=UTC),
    )


def test_the_data_noted_on_the_version_come_before_those_of_its_run(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {}, {"finetune_eval_data": "d1"})
    registry(databricks).set_tags(MODEL, "1", {"finetune_eval_data": "d2"})
    version = registry(databricks).version(MODEL, "1")
    assert version
    assert version.evaluated_on == "d2"


def test_a_run_that_is_gone(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5})
    databricks.runs.clear()
    assert registry(databricks).version(MODEL, "1") == ModelVersion(version="1", run_id=f"run-{MODEL}-1")


def test_a_version_whose_files_are_not_complete(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    databricks.models[MODEL].versions[1].status = "PENDING_REGISTRATION"
    version = registry(databricks).version(MODEL, "1")
    assert version
    assert not version.ready


def test_a_metric_that_is_no_number(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": math.nan})
    version = registry(databricks).version(MODEL, "1")
    assert version
    assert math.isnan(version.metrics["eval_loss"])


REFUSED: dict[str, tuple[str, Callable[[Registry], object], str]] = {
    "to read": ("GET /api/2.1", lambda unity: unity.model(MODEL), f"read the model {MODEL}"),
    "to set an alias": (
        "PUT /api/2.1",
        lambda unity: unity.set_alias(MODEL, "champion", "1"),
        f"set the alias champion of the model {MODEL}",
    ),
    "to remove an alias": (
        "DELETE /api/2.1",
        lambda unity: unity.delete_alias(MODEL, "champion"),
        f"remove the alias champion of the model {MODEL}",
    ),
    "to set tags": (
        "POST /api/2.0/mlflow",
        lambda unity: unity.set_tags(MODEL, "1", {"a": "b"}),
        f"set tags of version 1 of the model {MODEL}",
    ),
}


@pytest.mark.parametrize(("denied", "call", "what"), REFUSED.values(), ids=REFUSED)
def test_no_permission(
    databricks: Workspace, denied: str, call: Callable[[Registry], object], what: str
) -> None:
    databricks.add_version(MODEL, 1)
    databricks.denied = {denied}
    assert problem(lambda: call(registry(databricks))) == (
        ConditionReason.DATABRICKS_FORBIDDEN,
        f"Databricks at {databricks.uri} denied the operator permission to {what}: grant the permission, or use other "
        "credentials (PERMISSION_DENIED, HTTP 403)",
    )


def test_an_alias_of_a_version_that_does_not_exist(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    assert problem(lambda: registry(databricks).set_alias(MODEL, "champion", "7")) == (
        ConditionReason.DATABRICKS_ERROR,
        f"Databricks at {databricks.uri} failed to set the alias champion of the model {MODEL} (RESOURCE_DOES_NOT_EXIST, HTTP 404): "
        "see the log of the operator for the reason",
    )


@pytest.mark.parametrize("name", ["support", "llm.support", "a.b.c.d", "a..c", "main.llm/x.y"])
def test_names_without_three_levels(databricks: Workspace, name: str) -> None:
    assert problem(lambda: registry(databricks).model(name)) == (
        ConditionReason.DATABRICKS_ERROR,
        f"model {name} is not a three-level name, which Unity Catalog requires: use catalog.schema.name",
    )
    assert databricks.asked == []
