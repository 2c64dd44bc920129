"""Runs and versions of the stand-in workspace, asked as a training pod asks: with MLflow's own client and its environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from standins.databricks import Workspace

if TYPE_CHECKING:
    from mlflow import MlflowClient

MODEL = "main.llm.support"
_FOLDERS = {
    "with a signature": 'signature:\n  inputs: \'[{"type": "string"}]\'\n  outputs: \'[{"type": "string"}]\'\n',
    "without one": "",
    "with inputs alone": 'signature:\n  inputs: \'[{"type": "string"}]\'\n',
}


@pytest.fixture
def client(databricks: Workspace, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    environment = {
        **databricks.environment,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    return MlflowClient("databricks", "databricks-uc")


def folder(place: Path, kind: str) -> Path:
    """A model as it is uploaded."""
    place.mkdir()
    (place / "MLmodel").write_text(f"flavors: {{}}\n{_FOLDERS[kind]}")
    (place / "model").mkdir()
    (place / "model" / "weights").write_bytes(b"w" * 100)
    return place


def test_a_run_and_a_version(client: MlflowClient, databricks: Workspace, tmp_path: Path) -> None:
    from mlflow.entities import LoggedModelStatus

    experiment = client.create_experiment("/Shared/team")
    run = client.create_run(experiment, tags={"finetune.dev/uid": "u1"}).info
    client.log_metric(run.run_id, "loss", 1.5)
    client.log_param(run.run_id, "seed", 1)
    logged = client.create_logged_model(experiment, "model", source_run_id=run.run_id)
    local = folder(tmp_path / "model", "with a signature")
    client.log_model_artifacts(logged.model_id, str(local))
    client.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
    client.create_registered_model(MODEL)
    made = client.create_model_version(
        MODEL,
        f"models:/{logged.model_id}",
        run.run_id,
        tags={"finetune_eval_data": "d1"},
        model_id=logged.model_id,
    )
    found = client.search_runs([experiment], "tags.`finetune.dev/uid` = 'u1'")
    version = databricks.models[MODEL].versions[1]
    assert (
        run.artifact_uri,
        logged.artifact_location,
        [(item.info.run_id, item.data.metrics, item.data.params) for item in found],
        (made.version, made.status),
        (version.run_id, version.workspace_id, version.model_id, version.tags),
        databricks.files.read("/Models/main/llm/support/1/model/weights"),
        [item.version for item in client.search_model_versions(f"name='{MODEL}'")],
    ) == (
        f"dbfs:/databricks/mlflow-tracking/{experiment}/{run.run_id}/artifacts",
        f"dbfs:/databricks/mlflow-tracking/{experiment}/logged_models/{logged.model_id}",
        [(run.run_id, {"loss": 1.5}, {"seed": "1"})],
        ("1", "READY"),
        (run.run_id, "1234", logged.model_id, {"finetune_eval_data": "d1"}),
        b"w" * 100,
        ["1"],
    )


def _version(client: MlflowClient, place: Path, kind: str) -> Any:
    client.create_registered_model(MODEL)
    return client.create_model_version(MODEL, str(folder(place, kind)), None)


REFUSED: dict[str, tuple[Callable[[MlflowClient, Path], Any], str]] = {
    "an experiment without a path": (
        lambda client, _: client.create_experiment("team"),
        "An experiment name must be an absolute path",
    ),
    "an experiment in a folder that does not exist": (
        lambda client, _: client.create_experiment("/Nowhere/team"),
        "Parent directory /Nowhere does not exist",
    ),
    "a model with one name": (
        lambda client, _: client.create_registered_model("support"),
        "specify all three levels",
    ),
    "no signature": (
        lambda client, place: _version(client, place / "model", "without one"),
        "did not contain any signature metadata",
    ),
    "a signature without outputs": (
        lambda client, place: _version(client, place / "model", "with inputs alone"),
        "a signature that includes only inputs",
    ),
    "a tag with a slash": (
        lambda client, place: client.set_model_version_tag(
            MODEL, _version(client, place / "model", "with a signature").version, "a/b", "c"
        ),
        "Tag key 'a/b' is not valid",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_workspace_refuses(
    client: MlflowClient, tmp_path: Path, call: Callable[[MlflowClient, Path], Any], message: str
) -> None:
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException) as raised:
        call(client, tmp_path)
    assert message in str(raised.value)


def test_without_a_token(client: MlflowClient, databricks: Workspace) -> None:
    from mlflow.exceptions import MlflowException

    databricks.tokens.clear()
    with pytest.raises(MlflowException, match="Credential was not sent"):
        client.create_experiment("/Shared/team")
