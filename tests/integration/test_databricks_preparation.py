"""A preparation on Databricks, on a real API server: the operator submits, and the stand-in workspace runs the wheel for real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from finetune_operator import names
from fixtures.operator_processes.databricks import create_secret, world_with_wheel, write_table
from fixtures.operator_processes.jobs import job
from fixtures.operator_processes.world import World
from support.jars import jars_folder
from support.waiting import wait_for

if TYPE_CHECKING:
    # NB: imported by the fixture alone: the SDK of Databricks takes a second to import, in each worker.
    from fixtures.fake_databricks import Workspace

Json = dict[str, Any]
REPOSITORY = Path(__file__).parents[2]
VOLUME = "/Volumes/main/llm/work"
SAMPLE = REPOSITORY / "crds" / "samples" / "spark-databricks.yaml"
TRACKING = {"uri": "databricks", "registryUri": "databricks-uc", "secretRef": {"name": "databricks"}}
COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def workspace(tmp_path: Path, namespace: str, api: Any) -> Iterator[Workspace]:
    """A workspace with a volume, a table of questions and answers, a bucket, and a model in the cache of its clusters."""
    from fixtures.fake_databricks import Workspace, running
    from support.small_tokenizer import save_tokenizer

    state = Workspace()
    state.files.volumes.add(VOLUME)
    state.jobs.jars = str(jars_folder())
    (tmp_path / "lake").mkdir()
    state.jobs.buckets["lake"] = str(tmp_path / "lake")
    corpus = {
        "question": [f"What is {number} plus one?" for number in range(200)] + ["What is 0 plus one?", None],
        "answer": [str(number + 1) for number in range(200)] + ["1", "nothing"],
    }
    table = tmp_path / "chats"
    write_table(table, corpus)
    write_table(table, {"question": ["later"], "answer": ["row"]})
    state.jobs.tables["support.chats"] = str(table)
    for name in ("models--tiny--base", "models--Qwen--Qwen2.5-0.5B-Instruct"):
        model = tmp_path / "hub" / name
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(COMMIT)
        save_tokenizer(model / "snapshots" / COMMIT)
    with running(state):
        state.tracking.open()
        create_secret(api, namespace, "databricks", state.secret)
        yield state


@pytest.fixture
def prepared_world(
    api: Any, kubeconfig: Path, mlflow_server: Any, namespace: str, tmp_path: Path
) -> Iterator[World]:
    """A namespace whose operator has the wheel."""
    with world_with_wheel(api, kubeconfig, mlflow_server, namespace, tmp_path) as world:
        yield world


def on_databricks(*, hub: Path, **parts: Any) -> Json:
    cluster = {
        "sparkVersion": "17.3.x-scala2.13",
        "nodeType": "i3.xlarge",
        "workers": 0,
        "env": {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"},
    }
    data = {
        "source": {"type": "Delta", "table": "support.chats", "version": 0},
        "prepare": {
            "output": "s3://lake/splits",
            "filter": "length(question) < 100",
            "splitRatios": {"train": 0.8, "validation": 0.2, "test": 0},
            "spark": {
                "mode": "Databricks",
                "databricks": {
                    "volume": f"{VOLUME}/finetune",
                    "compute": {"type": "NewCluster", "newCluster": cluster},
                    "secretRef": {"name": "databricks"},
                },
            },
        },
    }
    checkpoint = {"uri": "s3://lake/checkpoints"}
    return job(data=data, model={"base": "tiny/base"}, checkpoint=checkpoint, **parts)


def test_from_a_table_to_training(prepared_world: World, workspace: Workspace, tmp_path: Path) -> None:
    world = prepared_world
    # A JVM starts, and Spark runs its first jobs.
    world.patience = 300
    register = {"model": "main.llm.tuned"}
    world.submit(on_databricks(hub=tmp_path / "hub", tracking=TRACKING, register=register))
    wait_for("a run", lambda: workspace.jobs.held, 60)
    run_id = wait_for("its id", lambda: world.status("tune").get("databricksRun", {}).get("runId"), 60)
    assert world.job("tune")["metadata"]["finalizers"] == [names.RUN_FINALIZER]
    try:
        status = world.wait_phase("tune", "Starting")
    finally:
        print((workspace.folder / "runs" / run_id / "log.txt").read_text(encoding="utf-8"))
    data = status["data"]
    assert (data["path"], data["version"], data["sourceVersion"]) == ("s3://lake/splits", 0, 0)
    assert data["columns"] == {"type": "PromptResponse", "prompt": "question", "response": "answer"}
    assert {item["step"]: item["rows"] for item in data["dropped"]} == {
        "notNull": 1,
        "filter": 0,
        "dedupe": 1,
    }
    assert sum(data["rows"].values()) == 200
    from deltalake import DeltaTable

    written = DeltaTable(str(tmp_path / "lake" / "splits")).to_pyarrow_table()
    assert (written.num_rows, min(written["tokens"].to_pylist()) > 0) == (200, True)
    page = f"{workspace.uri}/?o=1234#job/0/run/{run_id}"
    assert status["databricksRun"] == {
        "attempt": 1, "failures": 0, "state": "Succeeded", "runId": run_id, "url": page
    }  # fmt: skip
    assert status["links"]["preparation"] == page
    (only,) = workspace.jobs.held.values()
    assert only.token.startswith(world.job("tune")["metadata"]["uid"])
    check_report(workspace, status["mlflow"])
    assert world.wait_pods("tune-train-1", 2)
    wait_for("no finalizer", lambda: "finalizers" not in world.job("tune")["metadata"], 60)


def test_the_sample(prepared_world: World, workspace: Workspace, tmp_path: Path) -> None:
    """The sample spark-databricks on serverless compute. Its table has two names: Spark on this machine has no third level."""
    world, body = prepared_world, yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    world.patience, name = 300, body["metadata"]["name"]
    databricks = body["spec"]["data"]["prepare"]["spark"]["databricks"]
    workspace.files.volumes.add(databricks["volume"])
    workspace.jobs.environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    body["spec"]["data"]["source"]["table"] = "gold.conversations"
    write_table(tmp_path / "gold", {"messages": conversations()})
    workspace.jobs.tables["gold.conversations"] = str(tmp_path / "gold")
    world.submit(body)
    run_id = wait_for("its id", lambda: world.status(name).get("databricksRun", {}).get("runId"), 60)
    log = workspace.folder / "runs" / run_id / "log.txt"
    try:
        status = world.wait_phase(name, "Starting")
    finally:
        print(log.read_text(encoding="utf-8"))
    output = body["spec"]["data"]["prepare"]["output"]
    dropped = {item["step"]: item["rows"] for item in status["data"]["dropped"]}
    assert (status["data"]["path"], status["data"]["version"], dropped["dedupe"]) == (output, 0, 1)
    assert sum(status["data"]["rows"].values()) == 200 - dropped["near"]
    task = workspace.jobs.held[int(run_id)].task
    assert (task.environment_key, task.new_cluster, task.existing_cluster_id) == ("prepare", None, None)
    # Its MLflow run is in the cluster.
    (folder,) = (workspace.files.folder / databricks["volume"].lstrip("/") / "jobs").glob("*/1")
    assert (folder / "report.html").exists()
    assert "the report is only in " in log.read_text(encoding="utf-8")
    assert world.wait_pods(f"{name}-train-1", 1)


def conversations() -> list[list[Json]]:
    """The messages of 200 conversations, and of one of them again."""
    words = ("table", "report", "invoice", "router", "bicycle", "garden", "ticket", "engine")
    questions = [f"How do I return the {word} number {number}?" for word in words for number in range(25)]
    exchanges = [(f"{text} It arrived broken.", f"Send the {text[20:-1]} back.") for text in questions]
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in [*exchanges, exchanges[0]]
    ]


def check_report(workspace: Workspace, mlflow: Json) -> None:
    """The run in the workspace has the report, its pictures, and the last step."""
    run_id, experiment = mlflow["runId"], mlflow["experimentId"]
    place = f"/WorkspaceInternal/Mlflow/Artifacts/{experiment}/Runs/{run_id}/artifacts/preparation"
    listed = {item["name"] for item in workspace.files.list(place)["contents"]}
    assert listed == {"report.html", "funnel.png", "tokens.png"}
    assert b"s3://lake/splits" in workspace.files.read(f"{place}/report.html")
    tags = workspace.tracking.open().get_run(run_id).data.tags
    assert tags["finetune.dev/preparation"].startswith("writing")


def test_canceled_with_its_job(prepared_world: World, workspace: Workspace, tmp_path: Path) -> None:
    world, workspace.jobs.runs_wheels = prepared_world, False
    world.submit(on_databricks(hub=tmp_path / "hub"))
    wait_for("its id", lambda: world.status("tune").get("databricksRun", {}).get("runId"), 60)
    (run,) = workspace.jobs.held.values()

    def life() -> str:
        return str(run.life.value)

    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": True}})
    wait_for("the suspension", lambda: life() == "TERMINATING", 60)
    print(json.dumps(world.status("tune")["conditions"]))
    from databricks.sdk.service.jobs import TerminationCodeCode

    workspace.jobs.end(run.run_id, TerminationCodeCode.USER_CANCELED)
    world.wait_phase("tune", "Suspended")
    wait_for("no finalizer", lambda: "finalizers" not in world.job("tune")["metadata"], 60)
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": False}})
    wait_for("a second run", lambda: len(workspace.jobs.held) == 2, 60)
    run = [*workspace.jobs.held.values()][1]
    wait_for("its id", lambda: world.status("tune")["databricksRun"].get("runId") == str(run.run_id), 60)
    world.api.delete("FineTuneJob", world.namespace, "tune")
    wait_for("the deletion", lambda: life() == "TERMINATING", 60)
    assert world.job("tune")["metadata"]["finalizers"] == [names.RUN_FINALIZER]
    workspace.jobs.end(run.run_id, TerminationCodeCode.USER_CANCELED)
    wait_for("no job", lambda: world.api.get("FineTuneJob", world.namespace, "tune") is None, 60)
