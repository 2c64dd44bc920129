"""A FineTuneJob and a ModelPromotion from a Databricks workspace's run to its endpoint, on a real API server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fixtures.operator_processes.jobs import TRAINED, splits_given
from fixtures.operator_processes.world import World
from support.waiting import wait_for

if TYPE_CHECKING:
    # NB: imported by the fixture alone: the SDK of Databricks takes a second to import, in each worker.
    from fixtures.fake_databricks import Workspace

SECRETS = {"databricks": "dapi-good", "databricks-trainer": "dapi-trainer"}
TRACKING = {
    "uri": "databricks",
    "registryUri": "databricks-uc",
    "secretRef": {"name": "databricks"},
    "trainerSecretRef": {"name": "databricks-trainer"},
}
SIGNATURE = {"inputs": '[{"type": "string"}]', "outputs": '[{"type": "string"}]'}


@pytest.fixture
def workspace(world: World) -> Iterator[Workspace]:
    from fixtures.fake_databricks import running

    with running() as state:
        state.tracking.open()
        for name, token in SECRETS.items():
            values = {"DATABRICKS_HOST": state.uri, "DATABRICKS_TOKEN": token}
            data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
            meta = {"name": name, "namespace": world.namespace}
            world.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})
        yield state


def register(workspace: Workspace, model: str, run_id: str) -> None:
    """Play the trainer: a version with its files."""
    workspace.create_model(model)
    workspace.create_version({"name": model, "run_id": run_id, "run_tracking_server_id": "1234"})
    path = f"/Models/{model.replace('.', '/')}/1/MLmodel"
    workspace.files.write(path, f"signature: {SIGNATURE}".encode())
    workspace.finalize_version(model, "1")


def test_from_a_job_to_an_endpoint(world: World, workspace: Workspace) -> None:
    model = "main.llm.support"
    body = splits_given(tracking=TRACKING, register={"model": model, "aliases": ["staging"]})
    world.api.create({**body, "metadata": {**body["metadata"], "namespace": world.namespace}})
    pods = world.run_pods("tune-train-1", 2)
    status = world.wait_phase("tune", "Training")
    env = {item["name"]: item for item in pods[0]["spec"]["containers"][0]["env"]}
    assert env["MLFLOW_TRACKING_URI"]["value"] == "databricks"
    assert env["MLFLOW_REGISTRY_URI"]["value"] == "databricks-uc"
    assert env["DATABRICKS_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "databricks-trainer"
    assert "envFrom" not in pods[0]["spec"]["containers"][0]

    run = status["mlflow"]
    assert run["url"] == f"{workspace.uri}/ml/experiments/{run['experimentId']}/runs/{run['runId']}"
    register(workspace, model, run["runId"])
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    status = world.wait_phase("tune", "Succeeded")
    assert (status["model"]["name"], status["model"]["version"]) == (model, "1")
    assert status["links"]["model"] == f"{workspace.uri}/explore/data/models/main/llm/support/version/1"
    assert workspace.models[model].aliases == {"staging": 1}
    world.wait_condition("tune", "Tracked", "RunFinished")
    assert workspace.tracking.open().get_run(run["runId"]).info.status == "FINISHED"

    reference = {"secretRef": {"name": "databricks"}}
    world.api.create(
        {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "ModelPromotion",
            "metadata": {"name": "champion", "namespace": world.namespace},
            "spec": {
                "model": model,
                "alias": "champion",
                "source": {"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}},
                "tracking": {"uri": "databricks", "registryUri": "databricks-uc"} | reference,
                "serving": {"type": "Databricks", "endpoint": "support", "databricks": reference},
            },
        }
    )
    wait_for("champion", lambda: workspace.models[model].aliases == {"staging": 1, "champion": 1}, 60)
    wait_for("the endpoint", lambda: "support" in workspace.endpoints.held, 60)
    wait_for("its traffic", lambda: workspace.endpoints.routes("support") == {"1": 100}, 60)
