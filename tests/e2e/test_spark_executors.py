"""Two Spark executors in pods of their own prepare a corpus, are suspended, start anew, lose one, and no row differs."""

from __future__ import annotations

import hashlib
import json
import re

from demo.install import NAMESPACE
from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Jobs, Run, condition, quickstart
from finetune_crds.contract import TAG_PREPARATION
from support.waiting import wait_for

OUTPUT = "s3://finetune/splits/docstrings-executors"
# Many small tasks: both executors have some to do, and a stage lasts long enough to lose one in it.
SPARK: Json = {
    "mode": "Kubernetes",
    "executors": 2,
    "executorMemory": "1Gi",
    "driverMemory": "1Gi",
    "conf": {
        "spark.sql.files.maxPartitionBytes": "256k",
        "spark.sql.shuffle.partitions": "48",
        "spark.sql.adaptive.coalescePartitions.enabled": "false",
    },
}
# Executors request a core each. A driver that requests none would get what they leave of a busy machine.
DRIVER: Json = {
    "spec": {"containers": [{"name": "prep", "resources": {"requests": {"cpu": "500m"}}}]},
}


def test_rows_are_those_of_one_pod_after_a_suspension_and_the_loss_of_an_executor(
    jobs: Jobs, run: Run, hand: Hand
) -> None:
    job = quickstart()
    job["metadata"]["name"] = "on-executors"
    job["spec"]["data"]["prepare"] |= {"output": OUTPUT, "spark": SPARK, "podTemplate": DRIVER}
    del job["spec"]["register"]
    name = jobs.apply(job)

    jobs.until(name, "two executors", lambda status: "2 of 2 executors" in preparing(status), seconds=300)
    suspend(jobs, name, value=True)
    jobs.until(
        name,
        "being suspended",
        lambda status: status.get("phase") == "Suspended" and not executors(jobs, name),
    )
    suspend(jobs, name, value=False)
    lose_executor(jobs, hand, name)

    status = jobs.until(name, "its table", prepared, seconds=600)["status"]

    data, alone = status["data"], run.status["data"]
    same = ("rows", "tokens", "dropped")
    assert {field: data[field] for field in same} == {field: alone[field] for field in same}
    assert digest(hand, data) == digest(hand, alone)
    assert executors(jobs, name) == []


def preparing(status: Json) -> str:
    return str(condition(status, "Prepared").get("message", ""))


def prepared(status: Json) -> bool:
    return condition(status, "Prepared").get("status") == "True"


def executors(jobs: Jobs, name: str) -> list[str]:
    """The executors of a job that exist."""
    label = f"finetune.dev/job={name},finetune.dev/component=prep-executor"
    text = jobs.kubectl("get", "pods", "--namespace", NAMESPACE, "--selector", label, "--output", "name")
    return text.split()


def lose_executor(jobs: Jobs, hand: Hand, name: str) -> None:
    """Delete an executor while the job shows a stage of its tokens at work, and wait for the one that replaces it."""
    run_id = jobs.get(name)["status"]["mlflow"]["runId"]

    def shown(pattern: str) -> bool:
        """Whether the run shows that step of the preparation."""
        tag = hand.mlflow.get_run(run_id).data.tags.get(TAG_PREPARATION, "")
        return re.fullmatch(pattern, tag) is not None

    # NB: until the new driver shows its first step, the run shows the last one of the driver before.
    wait_for("the first step", lambda: len(executors(jobs, name)) == 2 and shown("reading.*"), 300)
    wait_for("a stage at work", lambda: shown("tokens [1-9].*"), 300)
    lost, kept = sorted(executors(jobs, name))
    jobs.kubectl("delete", lost, "--namespace", NAMESPACE, "--grace-period=0", "--force", timeout=60)
    assert shown("tokens .*"), "the stage was over before its executor was gone: give it more tasks"
    wait_for("another executor", lambda: {*executors(jobs, name)} - {lost, kept}, 120)


def suspend(jobs: Jobs, name: str, *, value: bool) -> None:
    patch = json.dumps({"spec": {"suspend": value}})
    jobs.kubectl("patch", "ftj", name, "--namespace", NAMESPACE, "--type", "merge", "--patch", patch)


def digest(hand: Hand, data: Json) -> str:
    """A digest of the rows of a table, in the order of their ids."""
    rows = hand.table(data["path"], data["version"]).to_pyarrow_table().to_pylist()
    ordered = sorted(json.dumps(row, sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()
