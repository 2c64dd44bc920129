"""docs/getting-started-gpu.md, rehearsed: its job and its promotion, with CPUs and a small model in place of the GPUs."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import s3fs

from demo.install import NAMESPACE, SAMPLES, STORAGE
from demo.kubectl import Json
from demo.promotions import at
from e2e.hand import Hand, reaching
from e2e.jobs import Jobs, Run
from e2e.stories import Stage

NAME = "support-chat"
CHATS = "corpora/chats"
# Three steps of one epoch.
EXAMPLES = 800
SECONDS = 300
WHERE = ("--namespace", NAMESPACE)


def run_story(stage: Stage) -> Json:
    """Run the guide's commands: apply, then wait for the job's end; return the job."""
    kubectl = stage.jobs.kubectl
    run = stage.quickstart()
    with reaching(stage.installation) as hand:
        put_chats(run, hand)
    # Those of a cluster that was kept.
    kubectl("delete", "ftj,mprom", NAME, *WHERE, "--ignore-not-found")
    kubectl("apply", *WHERE, "--kustomize", str(SAMPLES / "cpu"))
    # What it waits for, and how it ends where it does not succeed, is shown meanwhile.
    stage.jobs.follow(NAME)
    kubectl("wait", "ftj", NAME, *WHERE, "--for=condition=Finished", f"--timeout={SECONDS}s")
    return stage.jobs.get(NAME)


def put_chats(run: Run, hand: Hand) -> None:
    """Put conversations where the job reads them, made from the quickstart's splits."""
    data = run.status["data"]
    table = hand.table(data["path"], data["version"]).to_pyarrow_table(columns=["prompt", "response"])
    rows = table.slice(0, EXAMPLES).to_pylist()
    assert len(rows) == EXAMPLES
    messages = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
        for row in rows
    ]
    store = s3fs.S3FileSystem(
        key=hand.storage["AWS_ACCESS_KEY_ID"],
        secret=hand.storage["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=hand.storage["AWS_ENDPOINT_URL"],
    )
    store.makedirs(CHATS, exist_ok=True)
    with store.open(f"{CHATS}/chats.parquet", "wb") as file:
        pq.write_table(pa.table({"messages": messages}), file)


def test_the_job_succeeds_with_what_the_installation_gives(story: Json) -> None:
    status = story["status"]
    assert (status["phase"], status["device"]["type"]) == ("Succeeded", "CPU")
    assert status["data"]["columns"] == {"type": "Messages", "messages": "messages"}
    resolved = status["resolved"]
    table, _, digest = resolved["output"].rpartition("/")
    assert digest
    assert (table, resolved["checkpoint"]["uri"], resolved["model"]) == (
        f"{STORAGE}/splits/{NAMESPACE}",
        f"{STORAGE}/checkpoints",
        NAME,
    )
    # No part of it is in what was applied.
    assert story["spec"].keys() & {"pods", "checkpoint"} == set()


def test_its_version_is_registered_under_its_name(story: Json, hand: Hand) -> None:
    model = story["status"]["model"]
    version = hand.mlflow.get_model_version_by_alias(NAME, "candidate")
    assert (model["name"], model["version"]) == (NAME, str(version.version))
    assert version.run_id == story["status"]["mlflow"]["runId"]


def test_the_shortest_promotion_takes_it(story: Json, jobs: Jobs, hand: Hand) -> None:
    version = story["status"]["model"]["version"]
    assert jobs.promotion(NAME, at("Promoted", version))["model"] == NAME
    assert hand.aliases(NAME) == {"candidate": version, "champion": version}
