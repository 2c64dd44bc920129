"""docs/getting-started-gpu.md, rehearsed: its job and its promotion, with CPUs and a small model in place of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from demo.install import NAMESPACE, SAMPLES, STORAGE, Installation
from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Jobs, Run
from support.waiting import wait_for

NAME = "support-chat"
CHATS = "corpora/chats"
# Three steps of one epoch.
EXAMPLES = 800
SECONDS = 300
WHERE = ("--namespace", NAMESPACE)


@pytest.fixture(scope="module")
def chats(run: Run, hand: Hand) -> None:
    """Conversations in the place that the job reads, made from the quickstart's splits."""
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


@pytest.fixture(scope="module")
def finished(chats: None, jobs: Jobs, installation: Installation) -> Iterator[Json]:
    """The job as it is after the guide's commands: apply, then wait for its end."""
    kubectl = jobs.kubectl
    jobs.names.append(NAME)
    try:
        kubectl("apply", *WHERE, "--kustomize", str(SAMPLES / "cpu"))
        # What it waits for, and how it ends where it does not succeed, is shown meanwhile.
        jobs.follow(NAME)
        kubectl("wait", "ftj", NAME, *WHERE, "--for=condition=Finished", f"--timeout={SECONDS}s")
        yield jobs.get(NAME)
    finally:
        installation.delete("modelpromotion", NAME)


def test_the_job_succeeds_with_what_the_installation_gives(finished: Json) -> None:
    status = finished["status"]
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
    assert finished["spec"].keys() & {"envFrom", "checkpoint"} == set()


def test_its_version_is_registered_under_its_name(finished: Json, hand: Hand) -> None:
    model = finished["status"]["model"]
    version = hand.mlflow.get_model_version_by_alias(NAME, "candidate")
    assert (model["name"], model["version"]) == (NAME, str(version.version))
    assert version.run_id == finished["status"]["mlflow"]["runId"]


def test_the_shortest_promotion_takes_it(finished: Json, jobs: Jobs, hand: Hand) -> None:
    version = finished["status"]["model"]["version"]

    def promoted() -> bool:
        found = jobs.kubectl.get("modelpromotion", NAME, *WHERE) or {}
        status = found.get("status", {})
        return (status.get("phase"), status.get("model"), status.get("current")) == (
            "Promoted",
            NAME,
            version,
        )

    wait_for(
        f"champion is version {version}",
        promoted,
        SECONDS,
        instead=lambda: jobs.kubectl("describe", "mprom", NAME, *WHERE, check=False),
        pause=1,
    )
    assert hand.aliases(NAME) == {"candidate": version, "champion": version}
