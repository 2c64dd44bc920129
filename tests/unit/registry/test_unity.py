"""Models in Unity Catalog, with the real SDK against the stand-in workspace."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from finetune_crds.conditions import Reason
from finetune_operator.databricks import workspace
from finetune_operator.registry.base import ModelVersion, RegisteredModel, Registry
from finetune_operator.registry.unity import UnityRegistry
from finetune_operator.settings import Settings
from finetune_operator.tracking import TrackingError
from workspace import Workspace

MODEL = "main.llm.support"


def registry(state: Workspace) -> Registry:
    return UnityRegistry(
        workspace({"DATABRICKS_HOST": state.uri, "DATABRICKS_TOKEN": "dapi-good"}, Settings())
    )


def problem(call: Callable[[], object]) -> tuple[Reason, str]:
    with pytest.raises(TrackingError) as raised:
        call()
    return raised.value.problem.reason, raised.value.problem.message


def test_it_is_named_by_its_workspace(databricks: Workspace) -> None:
    assert registry(databricks).uri == databricks.uri.replace("http", "databricks-uc")


def test_a_model_and_its_aliases(databricks: Workspace) -> None:
    asked = registry(databricks)
    assert asked.model(MODEL) is None
    databricks.add_version(MODEL, 1)
    databricks.add_version(MODEL, 2)
    assert asked.model(MODEL) == RegisteredModel(MODEL, {})
    asked.set_alias(MODEL, "champion", "1")
    asked.set_alias(MODEL, "champion", "2")
    asked.set_alias(MODEL, "candidate", "1")
    assert asked.model(MODEL) == RegisteredModel(MODEL, {"champion": "2", "candidate": "1"})
    asked.delete_alias(MODEL, "champion")
    asked.delete_alias(MODEL, "champion")
    assert asked.model(MODEL) == RegisteredModel(MODEL, {"candidate": "1"})


def test_a_version(databricks: Workspace) -> None:
    asked = registry(databricks)
    assert asked.version(MODEL, "1") is None
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5}, {"finetune.dev/eval-data": "d1"})
    assert asked.version(MODEL, "2") is None
    asked.set_tags(MODEL, "1", {"reviewed": "yes", "by": "ana"})
    assert asked.version(MODEL, "1") == ModelVersion(
        version="1",
        run_id=f"run-{MODEL}-1",
        tags={"reviewed": "yes", "by": "ana"},
        metrics={"eval_loss": 1.5},
        evaluated_on="d1",
    )


def test_the_data_noted_on_the_version_come_before_those_of_its_run(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {}, {"finetune.dev/eval-data": "d1"})
    registry(databricks).set_tags(MODEL, "1", {"finetune.dev/eval-data": "d2"})
    found = registry(databricks).version(MODEL, "1")
    assert found
    assert found.evaluated_on == "d2"


def test_a_run_that_is_gone(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": 1.5})
    databricks.runs.clear()
    assert registry(databricks).version(MODEL, "1") == ModelVersion(version="1")


def test_a_version_whose_files_are_not_complete(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    databricks.models[MODEL].versions[1].status = "PENDING_REGISTRATION"
    found = registry(databricks).version(MODEL, "1")
    assert found
    assert not found.ready


def test_a_metric_that_is_no_number(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1, {"eval_loss": math.nan})
    found = registry(databricks).version(MODEL, "1")
    assert found
    assert math.isnan(found.metrics["eval_loss"])


REFUSED: dict[str, tuple[str, Callable[[Registry], object], str]] = {
    "to read": ("GET /api/2.1", lambda asked: asked.model(MODEL), f"read the model {MODEL}"),
    "to set an alias": (
        "PUT /api/2.1",
        lambda asked: asked.set_alias(MODEL, "champion", "1"),
        f"set the alias champion of the model {MODEL}",
    ),
    "to remove an alias": (
        "DELETE /api/2.1",
        lambda asked: asked.delete_alias(MODEL, "champion"),
        f"remove the alias champion of the model {MODEL}",
    ),
    "to set tags": (
        "POST /api/2.0/mlflow",
        lambda asked: asked.set_tags(MODEL, "1", {"a": "b"}),
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
        Reason.DATABRICKS_FORBIDDEN,
        f"Databricks at {databricks.uri} does not let the operator {what}: grant it the permission, or use other "
        "credentials (User does not have the permission on this object)",
    )


def test_an_alias_of_a_version_that_does_not_exist(databricks: Workspace) -> None:
    databricks.add_version(MODEL, 1)
    assert problem(lambda: registry(databricks).set_alias(MODEL, "champion", "7")) == (
        Reason.DATABRICKS_ERROR,
        f"Databricks at {databricks.uri} could not set the alias champion of the model {MODEL}: Version 7 of '{MODEL}' "
        "does not exist.",
    )


@pytest.mark.parametrize("name", ["support", "llm.support", "a.b.c.d", "a..c", "main.llm/x.y"])
def test_names_without_three_levels(databricks: Workspace, name: str) -> None:
    assert problem(lambda: registry(databricks).model(name)) == (
        Reason.DATABRICKS_ERROR,
        f"model {name} has no name of three levels, as Unity Catalog asks for: write catalog.schema.name",
    )
    assert databricks.asked == []
