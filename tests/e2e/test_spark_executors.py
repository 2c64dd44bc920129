"""Two Spark executors in pods of their own prepare a corpus, are suspended, start anew, and no row differs."""

from __future__ import annotations

import hashlib
import json

from demo.install import NAMESPACE
from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Jobs, Run, condition, quickstart

OUTPUT = "s3://finetune/splits/docstrings-executors"
# Many small tasks: both executors have some to do.
SPARK: Json = {
    "mode": "Kubernetes",
    "executors": 2,
    "executorMemory": "1Gi",
    "driverMemory": "1Gi",
    "conf": {"spark.sql.files.maxPartitionBytes": "256k", "spark.sql.shuffle.partitions": "16"},
}
# Executors request a core each. A driver that requests none would get what they leave of a busy machine.
DRIVER: Json = {
    "spec": {"containers": [{"name": "prep", "resources": {"requests": {"cpu": "500m"}}}]},
}


def test_rows_are_those_of_one_pod_also_after_a_suspension(jobs: Jobs, run: Run, hand: Hand) -> None:
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


def suspend(jobs: Jobs, name: str, *, value: bool) -> None:
    patch = json.dumps({"spec": {"suspend": value}})
    jobs.kubectl("patch", "ftj", name, "--namespace", NAMESPACE, "--type", "merge", "--patch", patch)


def digest(hand: Hand, data: Json) -> str:
    """A digest of the rows of a table, in the order of their ids."""
    rows = hand.table(data["path"], data["version"]).to_pyarrow_table().to_pylist()
    ordered = sorted(json.dumps(row, sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()
