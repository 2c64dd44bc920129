"""Many running jobs that report progress, and some of whose pods fail."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.operator.api import Json, mlflow_client
from bench.operator.figures import Reaction, Running
from bench.operator.job_watch import JobWatch
from bench.operator.pods import fail_pod, run_pods
from bench.operator.requests import count_access, count_audit
from bench.operator.run_writer import STEPS_PER_REPORT, RunWriter
from bench.operator.usage import cpu_seconds, memory_mib
from bench.operator.visit import Stage
from bench.promotions.world import stay
from finetune_operator import names
from support.waiting import WaitError, wait_for

_SECONDS_TO_TRAIN = 900.0
_SECONDS_BETWEEN_REPORTS = 60.0
_SECONDS_BETWEEN_FAILURES = 1.0
_SECONDS_TO_REACT = 300.0


def measure_running(stage: Stage, namespace: str, seconds: float, failures: int) -> Running:
    """Let all jobs of a namespace run and report progress, then fail one pod of some."""
    client, path = stage.plane.client, stage.contender.path(namespace)
    pods = client.items(f"/api/v1/namespaces/{namespace}/pods")
    run_pods(client, pods)
    wait_for(
        "all jobs train",
        lambda: all(is_training(job) for job in client.items(path)),
        _SECONDS_TO_TRAIN,
        stage.contender.process,
        pause=2,
    )
    jobs = client.items(path)
    runs = {job["metadata"]["name"]: str(job["status"]["mlflow"]["runId"]) for job in jobs}
    writer = RunWriter(mlflow_client(stage.mlflow.uri), list(runs.values()), _SECONDS_BETWEEN_REPORTS)
    writer.start()
    try:
        # The first reports, with which each status gets its progress.
        stay(_SECONDS_BETWEEN_REPORTS, stage.contender.process)
        running = _measure_steady(stage, writer, runs, path, seconds)
        _measure_reactions(stage, running, namespace, pods, failures)
    finally:
        writer.stop()
    return running


def _measure_steady(
    stage: Stage, writer: RunWriter, runs: dict[str, str], path: str, seconds: float
) -> Running:
    audit, pid = stage.plane.tail(), stage.pid
    stage.access.lines()
    reports, failures = sum(writer.steps.values()), writer.failures
    cpu_before, began = cpu_seconds(pid), time.monotonic()
    stay(seconds, stage.contender.process)
    elapsed, cpu_after = time.monotonic() - began, cpu_seconds(pid)
    memory, peak = memory_mib(pid)
    return Running(
        jobs=len(runs),
        seconds=elapsed,
        cpu_seconds=cpu_after - cpu_before,
        memory_mib=memory,
        peak_mib=peak,
        api_requests=count_audit(audit.lines()),
        mlflow_requests=count_access(stage.access.lines()),
        current_share=find_current_share(stage.plane.client.items(path), runs, writer.steps),
        reports=(sum(writer.steps.values()) - reports) // STEPS_PER_REPORT,
        lost_reports=writer.failures - failures,
    )


def _measure_reactions(
    stage: Stage, running: Running, namespace: str, pods: Sequence[Json], failures: int
) -> None:
    """Fail the first pod of some jobs, one after another, and wait for their next attempts."""
    watch = JobWatch(stage.plane.client, namespace)
    watch.start()
    first_pods = {pod["metadata"]["labels"]["job-name"]: pod for pod in pods}
    failed_at: dict[str, float] = {}
    for number in range(min(failures, running.jobs)):
        # NB: spread over all jobs, which the operator knows in the order of their creation.
        name = f"job-{number * running.jobs // failures:04d}"
        fail_pod(stage.plane.client, first_pods[names.train_name(name, 1)])
        failed_at[name] = time.monotonic()
        stay(_SECONDS_BETWEEN_FAILURES, stage.contender.process)
    try:
        wait_for(
            "the next attempts",
            lambda: all(names.train_name(name, 2) in watch.created for name in failed_at),
            _SECONDS_TO_REACT,
            stage.contender.process,
        )
    except WaitError:
        if not stage.contender.process.alive():
            raise
    for name, moment in failed_at.items():
        failed, created = (
            watch.failed.get(names.train_name(name, 1)),
            watch.created.get(names.train_name(name, 2)),
        )
        if failed is None or created is None:
            running.missed += 1
        else:
            running.reactions.append(Reaction(failed - moment, created - moment))


def is_training(job: Json) -> bool:
    """Whether a job trains, with a run of MLflow."""
    status = job.get("status") or {}
    return status.get("phase") == "Training" and bool((status.get("mlflow") or {}).get("runId"))


def find_current_share(jobs: Sequence[Json], runs: dict[str, str], steps: dict[str, int]) -> float:
    """The share of jobs whose status has the last step of their run, or the report before it."""
    current = 0
    for job in jobs:
        progress = (job.get("status") or {}).get("progress") or {}
        last_step = steps.get(runs[job["metadata"]["name"]], 0)
        step = int(progress.get("step", 0))
        current += step > 0 and step >= last_step - STEPS_PER_REPORT
    return current / len(jobs)
