"""From a table to an endpoint and back: the sample databricks-chain, whole, with a workspace that stands in for Databricks.

What runs is real: the operator's wheel in a Spark on this machine, two pods with torchrun, MLflow's own client and server. The
workspace's Unity Catalog and its endpoints are played.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from demo.install import CORPUS, NAMESPACE, SAMPLES, Installation
from demo.kubectl import Json
from demo.promotions import at
from e2e.conftest import CLUSTER
from e2e.hand import Hand, reaching
from e2e.jobs import Jobs, condition
from e2e.workspace import Place, create_bucket, create_secrets, create_table, parquet, reachable
from fixtures.fake_databricks import Workspace
from fixtures.fake_databricks.endpoints import exported
from support.waiting import wait_for

MODEL, ENDPOINT = "ml.prod.support_qwen", "support-qwen"
JOB, STAGING, CHAMPION = "support-qwen", "support-qwen-staging", "support-qwen-champion"
# Spark's own catalog on this machine has no third level.
TABLE = "gold.conversations"
ROWS, STEPS = 400, 8
# The small model takes this bar.
LOSS = 8


@pytest.fixture
def place(installation: Installation, tmp_path: Path) -> Iterator[Place]:
    """A workspace with a table of conversations, and with a champion that somebody else made."""
    with (
        reaching(installation) as hand,
        reachable(CLUSTER, hand, "Qwen/Qwen2.5-0.5B-Instruct", tmp_path) as databricks,
    ):
        create_bucket(hand, "lake")
        create_secrets(installation.place.kubectl, databricks.workspace, "lake-credentials")
        create_table(databricks.workspace, TABLE, conversations(hand), tmp_path / "conversations")
        databricks.workspace.files.volumes.add("/Volumes/support/finetuning/work")
        databricks.workspace.add_version(MODEL, 1)
        for alias in ("staging", "champion"):
            databricks.workspace.set_alias(MODEL, alias, 1)
        yield databricks


@pytest.fixture
def gone(place: Place, installation: Installation) -> Iterator[None]:
    """The sample's objects are gone before the workspace is."""
    yield
    names = ("mprom/" + STAGING, "mprom/" + CHAMPION, "ftj/" + JOB)
    where = ("--namespace", NAMESPACE, "--ignore-not-found", "--cascade=foreground")
    installation.place.kubectl("delete", *names, *where, timeout=300)


def conversations(hand: Hand) -> list[Json]:
    """Questions and answers of the demo's corpus, as conversations."""
    rows = parquet(hand, CORPUS, ["instruction", "answer"])
    answered = [row for row in rows if 40 < len(row["answer"]) < 600]
    return [
        {
            "messages": [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in answered[:ROWS]
    ]


def manifests(place: Place) -> list[Json]:
    """The sample with the addresses of this place, for a small model on CPUs, and with less to wait for."""
    job, staging, champion = yaml.safe_load_all(
        (SAMPLES / "databricks-chain.yaml").read_text(encoding="utf-8")
    )
    spec = job["spec"]
    spec["data"]["source"]["table"] = TABLE
    spec["pods"]["all"]["env"] = [{"name": "HF_ENDPOINT", "value": place.hub}]
    spec["distributed"] = {"nodes": 2, "device": "CPU"}
    spec["training"] = {"maxSteps": STEPS, "maxLength": 512, "precision": "FP32", "logEverySteps": 1}
    staging["spec"]["gates"][0]["metric"]["max"] = LOSS
    for step in champion["spec"]["serving"]["canary"]["steps"]:
        step["durationSeconds"] = 1
    return [job, staging, champion]


@pytest.mark.usefixtures("gone")
def test_from_a_table_to_an_endpoint_and_back(place: Place, jobs: Jobs, installation: Installation) -> None:
    workspace = place.workspace
    shares = workspace.endpoints.shares.setdefault(ENDPOINT, [])
    name = jobs.apply(*manifests(place))
    jobs.promotion(CHAMPION, at("Promoted", "1"))
    wait_for("the champion is served", lambda: shares == [{"1": 100}], 120)

    job = jobs.follow(name)
    check_lineage(job, workspace)
    jobs.promotion(STAGING, at("Promoted", "2"))
    jobs.promotion(
        CHAMPION,
        lambda status: "version 1 has no eval_loss" in condition(status, "GatesPassed").get("message", ""),
    )

    evaluate_champion(workspace)
    wait_for("a part of the traffic", lambda: len(shares) == 2, 120)
    jobs.promotion(
        CHAMPION,
        lambda status: "has no error_rate" in condition(status, "Served").get("message", ""),
    )
    workspace.endpoints.metrics[ENDPOINT] = exported(ENDPOINT, {"1": (950, 0, 0), "2": (50, 0, 0)})
    wait_for("all of the traffic", lambda: len(shares) == 4, 120)
    jobs.promotion(CHAMPION, at("Promoted", "2"))
    assert workspace.models[MODEL].aliases == {"staging": 2, "champion": 2}

    installation.patch("modelpromotion", CHAMPION, {"rollbackTo": {"type": "Previous"}})
    status = jobs.promotion(CHAMPION, at("Promoted", "1"))
    wait_for("the traffic is back", lambda: len(shares) == 5, 120)
    assert shares == [{"1": 100}, {"2": 5, "1": 95}, {"2": 25, "1": 75}, {"2": 100}, {"1": 100}]
    assert workspace.models[MODEL].aliases == {"staging": 2, "champion": 1}
    moves = [(item.get("fromVersion"), item["toVersion"], item["reason"]) for item in status["history"]]
    assert moves[:2] == [("2", "1", "RolledBack"), ("1", "2", "Promoted")]


def check_lineage(job: Json, workspace: Workspace) -> None:
    """The table, the run in the workspace and the version in Unity Catalog name each other."""
    status = job["status"]
    data, run_id = status["data"], status["mlflow"]["runId"]
    assert (data["path"], data["version"], data["sourceVersion"]) == (
        "s3://lake/finetune/support-qwen/splits",
        0,
        0,
    )
    assert status["databricksRun"]["state"] == "Succeeded"
    assert status["progress"]["step"] == STEPS
    assert (status["model"]["name"], status["model"]["version"]) == (MODEL, "2")
    run = workspace.tracking.open().get_run(run_id)
    assert (run.info.status, run.data.params["max_steps"]) == ("FINISHED", str(STEPS))
    artifacts = f"/WorkspaceInternal/Mlflow/Artifacts/{run.info.experiment_id}/Runs/{run_id}/artifacts"
    assert data["path"].encode() in workspace.files.read(f"{artifacts}/preparation/report.html")
    version = workspace.models[MODEL].versions[2]
    assert (version.run_id, version.workspace_id, version.status) == (run_id, workspace.workspace_id, "READY")
    expected_tags = {
        "team": "support",
        "finetune_data_path": data["path"],
        "finetune_data_version": "0",
        "finetune_data_digest": data["digest"],
        "finetune_source": TABLE,
        "finetune_source_version": "0",
        "finetune_eval_data": run.data.tags["finetune_eval_data"],
    }
    assert expected_tags.items() <= version.tags.items()
    model = yaml.safe_load(workspace.files.read(f"/Models/{MODEL.replace('.', '/')}/2/MLmodel"))
    inputs = json.loads(model["signature"]["inputs"])
    assert (model["metadata"]["task"], [column["name"] for column in inputs][:3]) == (
        "llm/v1/chat",
        ["messages", "temperature", "max_tokens"],
    )


def evaluate_champion(workspace: Workspace) -> None:
    """Play a person who evaluates the champion on the data of the new version: it is worse."""
    versions = workspace.models[MODEL].versions
    versions[1].tags |= {"finetune_eval_data": versions[2].tags["finetune_eval_data"], "eval_loss": "9"}
