"""The samples databricks-chain and feedback-loop, whole, with a workspace that stands in for Databricks.

From a table to an endpoint and back, and from the answers of the endpoint to the next version.
What runs is real: the operator's wheel in a Spark on this machine, two pods with torchrun, MLflow's own client and server. The
workspace's Unity Catalog and its endpoints are played.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from demo.install import CORPUS, NAMESPACE, SAMPLES, Installation
from demo.kubectl import Json
from demo.promotions import at
from e2e.conftest import CLUSTER
from e2e.hand import Hand, reaching
from e2e.jobs import Jobs, condition
from e2e.workspace import Place, create_bucket, create_secrets, create_table, parquet, reachable
from fixtures import inference_tables
from fixtures.fake_databricks import Workspace
from fixtures.fake_databricks.endpoints import exported
from support.waiting import wait_for

MODEL, ENDPOINT = "ml.prod.support_qwen", "support-qwen"
JOB, STAGING, CHAMPION = "support-qwen", "support-qwen-staging", "support-qwen-champion"
# Spark's own catalog on this machine has no third level.
TABLE = "gold.conversations"
ROWS, STEPS = 400, 8
SCHEDULE, NEXT_CHAMPION = "assistant-feedback", "assistant-champion"
REQUESTS, FEEDBACK = "gold.support_payload", "gold.feedback"
RATED = 100
# The small model takes this bar.
LOSS = 8


@pytest.fixture(scope="module")
def place(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A workspace with a table of conversations, and with a champion that somebody else made."""
    tmp_path = tmp_path_factory.mktemp("workspace")
    with (
        reaching(installation) as hand,
        reachable(CLUSTER, hand, "Qwen/Qwen2.5-0.5B-Instruct", tmp_path) as databricks,
    ):
        create_bucket(hand, "lake")
        create_secrets(installation.place.kubectl, databricks.workspace, "lake-credentials")
        rows = conversations(hand)
        create_table(databricks.workspace, TABLE, pa.Table.from_pylist(rows), tmp_path / "conversations")
        create_served_answers(databricks.workspace, rows, tmp_path)
        databricks.workspace.files.volumes.add("/Volumes/support/finetuning/work")
        databricks.workspace.add_version(MODEL, 1)
        for alias in ("staging", "champion"):
            databricks.workspace.set_alias(MODEL, alias, 1)
        yield databricks


@pytest.fixture(scope="module")
def cleaned_up(place: Place, installation: Installation) -> Iterator[None]:
    """The samples' objects are gone before the workspace is."""
    yield
    names = (
        "fts/" + SCHEDULE,
        "mprom/" + NEXT_CHAMPION,
        "mprom/" + STAGING,
        "mprom/" + CHAMPION,
        "ftj/" + JOB,
    )
    _delete(installation, *names)


def _delete(installation: Installation, *names: str) -> None:
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


def create_served_answers(workspace: Workspace, rows: list[Json], folder: Path) -> None:
    """Play the endpoint, whose answers are logged, and the people who like half of them and correct the others."""
    turns = [[message["content"] for message in row["messages"]] for row in rows[:RATED]]
    answers = {f"request-{number}": (question, answer) for number, (question, answer) in enumerate(turns)}
    corrections = {
        request: f"{answer} It is done." if number % 2 else None
        for number, (request, (_question, answer)) in enumerate(answers.items())
    }
    create_table(workspace, REQUESTS, pa.table(inference_tables.build_requests(answers)), folder / "requests")
    create_table(
        workspace, FEEDBACK, pa.table(inference_tables.build_feedback(corrections)), folder / "feedback"
    )


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


@pytest.mark.usefixtures("cleaned_up")
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
    # Whoever loads the champion from the registry does not get a version that the endpoint still tries.
    assert workspace.models[MODEL].aliases["champion"] == 1
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


def train_champion(place: Place, jobs: Jobs) -> None:
    """Train version 2 of the model as the chain does, unless the test of the chain has."""
    if 2 not in place.workspace.models[MODEL].versions:
        job, *_promotions = manifests(place)
        jobs.follow(jobs.apply(job))


def feedback_manifests(place: Place) -> list[Json]:
    """The sample with the addresses of this place, for the small model of the chain, and with a start every minute."""
    schedule, promotion = yaml.safe_load_all((SAMPLES / "feedback-loop.yaml").read_text(encoding="utf-8"))
    schedule["spec"]["schedule"] = "* * * * *"
    spec = schedule["spec"]["jobTemplate"]["spec"]
    spec["model"]["base"] = f"models:/{MODEL}@champion"
    source = spec["data"]["source"]
    source["table"], source["feedback"]["table"] = REQUESTS, FEEDBACK
    spec["method"]["lora"] = {"rank": 16, "alpha": 64}
    spec["training"] = {"maxSteps": 15, "learningRate": 1e-2, "maxLength": 512, "precision": "FP32"}
    spec["distributed"] = {"nodes": 2, "device": "CPU"}
    del spec["pods"]["evaluate"]
    spec["register"]["model"] = promotion["spec"]["model"] = MODEL
    promotion["spec"]["serving"]["endpoint"] = ENDPOINT
    return [schedule, promotion]


@pytest.mark.usefixtures("cleaned_up")
def test_feedback_on_its_answers_trains_the_next_champion(
    place: Place, jobs: Jobs, installation: Installation
) -> None:
    workspace = place.workspace
    train_champion(place, jobs)
    _delete(installation, "mprom/" + STAGING, "mprom/" + CHAMPION)
    workspace.set_alias(MODEL, "champion", 2)
    installation.apply(yaml.safe_dump_all(feedback_manifests(place)))
    jobs.promotion(NEXT_CHAMPION, lambda status: status.get("current") == "2", stuck=())
    label = f"finetune.dev/schedule={SCHEDULE}"
    job = wait_for("the schedule starts a job", lambda: jobs.api.list("FineTuneJob", NAMESPACE, label), 120)[
        0
    ]
    installation.patch("finetuneschedule", SCHEDULE, {"suspend": True})

    status = jobs.follow(job["metadata"]["name"])["status"]
    assert status["pinned"]["base"] == f"models:/{MODEL}/2"
    assert sum(status["data"]["rows"].values()) == RATED
    loss, base_loss = (status["evaluation"]["metrics"][0][name] for name in ("value", "base"))
    assert loss < 0.99 * base_loss
    promoted = jobs.promotion(NEXT_CHAMPION, at("Promoted", "3"))
    [verdict] = promoted["gates"]["verdicts"]
    assert "since version 2, which has the alias, has " in verdict["message"]
    assert workspace.models[MODEL].aliases["champion"] == 3
    wait_for(
        "the new champion is served", lambda: workspace.endpoints.shares[ENDPOINT][-1] == {"3": 100}, 120
    )


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
