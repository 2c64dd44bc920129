"""Two Spark executors in pods of their own prepare a corpus, are suspended, start anew, lose one, and no row differs.

The job that trains on these rows is deleted meanwhile, and leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass

from demo.install import NAMESPACE
from demo.kubectl import Json
from e2e.hand import Hand, reaching
from e2e.jobs import Jobs, Run, condition, quickstart
from e2e.stories import Stage
from finetune_crds.contract import TAG_PREPARATION
from support.waiting import WaitError, wait_for

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
    "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "500m"}}}]},
}


@dataclass(frozen=True)
class Executors:
    """What became of the job.

    Attributes:
        prepared: its status with its table.
        children: what existed of it when it was deleted in its training.
        leftovers: what remained of that.
    """

    prepared: Json
    children: list[str]
    leftovers: list[str]


def run_story(stage: Stage) -> Executors:
    """Prepare the corpus with a suspension and a loss of an executor on the way; delete the job as soon as it trains."""
    jobs = stage.jobs
    job = quickstart()
    job["metadata"]["name"] = "on-executors"
    job["spec"]["data"]["prepare"] |= {"output": OUTPUT, "spark": SPARK}
    job["spec"]["pods"]["prepare"] = {"template": DRIVER}
    del job["spec"]["register"]
    job["spec"]["training"] |= {"maxSteps": 100_000, "logEverySteps": 1}
    job["spec"]["distributed"]["processesPerNode"] = 1
    name = jobs.apply(job)
    try:
        status = prepare_on_executors(stage, name)
        jobs.until(name, "training", lambda status: status.get("phase") == "Training")
        children = jobs.children(name)
    finally:
        jobs.delete(name)
    with suppress(WaitError):
        wait_for("no child of the job exists", lambda: not jobs.children(name), 150, pause=1)
    return Executors(status, children, jobs.children(name))


def prepare_on_executors(stage: Stage, name: str) -> Json:
    """Suspend the preparation, resume it, and lose one of its executors; return the job's status with its table."""
    jobs = stage.jobs
    jobs.until(name, "two executors", lambda status: "2 of 2 executors" in preparing(status))
    jobs.suspend(name, value=True)
    jobs.until(
        name,
        "being suspended",
        lambda status: status.get("phase") == "Suspended" and not executors(jobs, name),
    )
    jobs.suspend(name, value=False)
    lose_executor(stage, name)

    status: Json = jobs.until(name, "its table", prepared, seconds=600)["status"]
    wait_for("no executor is left", lambda: not executors(jobs, name), 30)
    return status


def test_rows_are_those_of_one_pod_after_a_suspension_and_the_loss_of_an_executor(
    story: Executors, run: Run, hand: Hand
) -> None:
    data, alone = story.prepared["data"], run.status["data"]
    same = ("rows", "tokens", "dropped")
    assert {field: data[field] for field in same} == {field: alone[field] for field in same}
    assert digest(hand, data) == digest(hand, alone)


def test_a_job_deleted_while_it_trains_leaves_nothing(story: Executors) -> None:
    assert story.children
    assert story.leftovers == []


def preparing(status: Json) -> str:
    return str(condition(status, "Prepared").get("message", ""))


def prepared(status: Json) -> bool:
    return condition(status, "Prepared").get("status") == "True"


def executors(jobs: Jobs, name: str) -> list[str]:
    """The executors of a job that exist."""
    return jobs.pods(name, "prep-executor")


def lose_executor(stage: Stage, name: str) -> None:
    """Delete an executor while the job shows a stage of its tokens at work, and wait for the one that replaces it."""
    jobs = stage.jobs
    run_id = jobs.get(name)["status"]["mlflow"]["runId"]
    with reaching(stage.installation) as hand:

        def shown(pattern: str) -> bool:
            """Whether the run shows that step of the preparation."""
            tag = hand.mlflow.get_run(run_id).data.tags.get(TAG_PREPARATION, "")
            return re.fullmatch(pattern, tag) is not None

        # NB: until the new driver shows its first step, the run shows the last one of the driver before.
        wait_for("the first step", lambda: len(executors(jobs, name)) == 2 and shown("reading.*"), 300)
        wait_for("a stage at work", lambda: shown("tokens [1-9].*"), 300)
        lost, survivor = sorted(executors(jobs, name))
        where = ("--namespace", NAMESPACE, "--grace-period=0", "--force")
        jobs.kubectl("delete", "pod", lost, *where, timeout=60)
        assert shown("tokens .*"), "the stage was over before its executor was gone: give it more tasks"
    wait_for("another executor", lambda: {*executors(jobs, name)} - {lost, survivor}, 120)


def digest(hand: Hand, data: Json) -> str:
    """A digest of the rows of a table, in the order of their ids."""
    rows = hand.table(data["path"], data["version"]).to_pyarrow_table().to_pylist()
    ordered = sorted(json.dumps(row, sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(ordered).encode()).hexdigest()
