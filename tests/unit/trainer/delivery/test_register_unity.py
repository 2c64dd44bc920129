"""The trainer registers a model in Unity Catalog, through MLflow's own client, in the stand-in workspace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from finetune_trainer.train.delivery import signature
from finetune_trainer.train.delivery.register import Registry
from fixtures.fake_databricks import Workspace, running

MODEL = "main.llm.support"
TEXT = '[{"type": "string", "required": true}]'
SIGNATURE = f"signature:\n  inputs: '{TEXT}'\n  outputs: '{TEXT}'\n"


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """What the operator's environment tells a pod."""
    with running() as state:
        state.tracking.open()
        for name, value in state.environment.items():
            monkeypatch.setenv(name, value)
        yield state


@pytest.fixture
def run_id(workspace: Workspace) -> str:
    mlflow = mlflow_run.create_client()
    return str(mlflow.create_run(mlflow.create_experiment("/Shared/team")).info.run_id)


def exported(folder: Path, signature: str = SIGNATURE) -> Path:
    """What the export leaves."""
    (folder / "model").mkdir(parents=True)
    (folder / "MLmodel").write_text(f"flavors: {{}}\n{signature}")
    (folder / "model" / "weights").write_bytes(b"w" * 100)
    return folder


def test_a_version_once(workspace: Workspace, run_id: str, tmp_path: Path) -> None:
    registry, folder = Registry(run_id, None, patience_seconds=5), exported(tmp_path / "export")
    assert registry.find_version(MODEL) is None
    model_id = registry.upload(folder)
    versions = [registry.register(MODEL, model_id, folder, {"finetune_eval_data": "d1"}) for _ in range(2)]
    (version,) = workspace.models[MODEL].versions.values()
    downloads = [path for method, path in workspace.asked if "download" in path]
    assert (
        versions,
        registry.find_version(MODEL),
        (version.status, version.run_id, version.model_id, version.tags),
        workspace.files.read("/Models/main/llm/support/1/model/weights"),
        downloads,
    ) == (
        ["1", "1"],
        "1",
        ("READY", run_id, model_id, {"finetune_eval_data": "d1"}),
        b"w" * 100,
        [],
    )


def test_a_version_has_the_signature_of_its_examples(
    workspace: Workspace, run_id: str, tmp_path: Path
) -> None:
    from mlflow.models import Model, ModelSignature

    request = {"messages": [{"role": "user", "content": "Is it red?"}]}
    inferred = signature.infer_signature(signature.Examples(chat=True, requests=[request], answers=["Yes."]))
    registry, folder = Registry(run_id, None, patience_seconds=5), exported(tmp_path / "export")
    Model(signature=inferred).save(str(folder / "MLmodel"))
    assert registry.register(MODEL, registry.upload(folder), folder, {}) == "1"
    stored = yaml.safe_load(workspace.files.read("/Models/main/llm/support/1/MLmodel"))
    assert ModelSignature.from_dict(stored["signature"]) == inferred


def test_a_version_whose_upload_was_cut_short_is_none(
    workspace: Workspace, run_id: str, tmp_path: Path
) -> None:
    registry, folder = Registry(run_id, None, patience_seconds=5), exported(tmp_path / "export")
    workspace.create_model(MODEL)
    workspace.create_version({"name": MODEL, "run_id": run_id})
    assert registry.find_version(MODEL) is None
    assert registry.register(MODEL, registry.upload(folder), folder, {}) == "2"


def test_a_model_without_a_signature(workspace: Workspace, run_id: str, tmp_path: Path) -> None:
    registry, folder = Registry(run_id, None, patience_seconds=0.1), exported(tmp_path / "export", "")
    with pytest.raises(TrainingError, match="did not contain any signature metadata"):
        registry.register(MODEL, registry.upload(folder), folder, {})


def test_a_pod_that_may_not_create_versions(workspace: Workspace, run_id: str, tmp_path: Path) -> None:
    registry, folder = Registry(run_id, None, patience_seconds=0.1), exported(tmp_path / "export")
    workspace.denied = {"POST /api/2.0/mlflow/unity-catalog/model-versions/create"}
    with pytest.raises(RecipeRefusedError, match="does not have the permission"):
        registry.register(MODEL, registry.upload(folder), folder, {})
