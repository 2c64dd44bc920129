"""Hours of pods and GPUs: each pod counts once, whatever happens to it or to the operator."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.status_parts import JobUsage, Usage
from finetune_operator.finetunejob.decide.usage import EARLIER_JOBS, add_usage
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    PREPARED,
    TRAINING,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    pod,
    running,
    stamped,
    status,
)

Json = dict[str, Any]
JOB = "tune-train-1"
GPU = "nvidia.com/gpu"
HOUR = 3600


def ran(index: int, seconds: int, *, gpus: int = 0, job: str = JOB, begin: float = 0) -> Json:
    """A pod that ended after so many seconds."""
    return ended(job, index, 0, at=int(begin) + seconds, gpus=gpus, startTime=stamped(begin))


def runs(index: int, begin: float = 0, *, gpus: int = 0, job: str = JOB, **meta: Any) -> Json:
    """A pod that still runs."""
    total = pod(job, index, gpus=gpus, startTime=stamped(begin))
    return {**total, "metadata": {**total["metadata"], **meta}}


def entry(pod_seconds: int, gpu_seconds: int = 0, job: str = JOB, *, until: float) -> JobUsage:
    """What the pods of a Job used until so many seconds after NOW."""
    return JobUsage(
        uid=f"uid-of-{job}", pod_seconds=pod_seconds, gpu_seconds=gpu_seconds, counted_until=later(until)
    )


def usage(*jobs: JobUsage) -> Usage:
    return Usage(
        pod_hours=round(sum(item.pod_seconds for item in jobs) / HOUR, 2),
        gpu_hours=round(sum(item.gpu_seconds for item in jobs) / HOUR, 2),
        jobs=list(jobs),
    )


STOPPING: Json = {"deletionTimestamp": stamped(820), "deletionGracePeriodSeconds": 120}
EVICTED_AT = [{"type": "DisruptionTarget", "status": "True", "lastTransitionTime": stamped(300)}]
# What was recorded, the pods, seconds since NOW, whether the job ends, and what is recorded then.
USED: dict[str, tuple[Usage | None, list[Json], float, bool, Usage | None]] = {
    "nothing": (None, [], 0, False, None),
    "a pod that no node took": (None, [pod(JOB, 0, "Pending", ready=False)], HOUR, False, None),
    "a pod that began just now": (None, [runs(0)], 599, False, None),
    "two pods that ended": (
        None,
        [ran(0, 1800, gpus=8), ran(1, 1200, gpus=8)],
        9000,
        False,
        usage(entry(3000, 24000, until=9000)),
    ),
    "pods that run count in whole steps": (
        None,
        [runs(0, gpus=2), runs(1, 30)],
        1234,
        False,
        usage(entry(2370, 2400, until=1200)),
    ),
    "a job that ends counts them to the second": (
        None,
        [runs(0), runs(1, 30)],
        1234,
        True,
        usage(entry(2438, until=1234)),
    ),
    "a pod that stops counts until it was told to": (
        None,
        [runs(0, **STOPPING)],
        1234,
        False,
        usage(entry(700, until=1200)),
    ),
    "a pod that its node evicted": (
        None,
        [pod(JOB, 0, "Failed", startTime=stamped(0), conditions=EVICTED_AT)],
        HOUR,
        False,
        usage(entry(300, until=HOUR)),
    ),
    "the same pod twice": (None, [ran(0, 60), ran(0, 60)], 600, False, usage(entry(60, until=600))),
    "a pod again, after a restart of the operator": (
        usage(entry(60, until=600)),
        [ran(0, 60)],
        600,
        False,
        usage(entry(60, until=600)),
    ),
    "a pod that no longer exists": (
        usage(entry(3600, 7200, until=HOUR)),
        [],
        9000,
        False,
        usage(entry(3600, 7200, until=HOUR)),
    ),
    "one of two pods no longer exists": (
        usage(entry(3000, until=1800)),
        [ran(1, 1200)],
        9000,
        False,
        usage(entry(3000, until=1800)),
    ),
    "a pod in the place of one that no longer exists": (
        usage(entry(10 * HOUR, 80 * HOUR, until=10 * HOUR)),
        [runs(0, 12 * HOUR, gpus=8)],
        13 * HOUR,
        False,
        usage(entry(11 * HOUR, 88 * HOUR, until=13 * HOUR)),
    ),
    "the other pods, when one ends between two steps": (
        usage(entry(1200, until=600)),
        [ran(0, 754), runs(1)],
        756,
        False,
        usage(entry(1508, until=754)),
    ),
    "a pod whose node's clock is ahead": (
        usage(entry(1200, until=600)),
        [ran(0, 790), runs(1)],
        756,
        False,
        usage(entry(1200, until=600)),
    ),
    "another attempt": (
        usage(entry(1800, until=2400)),
        [ran(0, 1800), ran(0, 600, job="tune-train-2", begin=2000)],
        9000,
        False,
        usage(entry(1800, until=2400), entry(600, job="tune-train-2", until=8600)),
    ),
}


@pytest.mark.parametrize(("before", "pods", "seconds", "final", "expected"), USED.values(), ids=USED)
def test_used(
    before: Usage | None, pods: list[Json], seconds: float, final: bool, expected: Usage | None
) -> None:
    assert add_usage(before, pods, set(), at=later(seconds), final=final, resource=GPU) == expected


def test_many_attempts_become_one_entry_but_for_those_that_can_still_be_counted() -> None:
    attempts = [entry(HOUR, 2 * HOUR, job=f"tune-train-{number}", until=9000) for number in range(1, 8)]
    before = usage(entry(60, job="tune-prep", until=9000), *attempts)
    pods = [ran(0, 60, job="tune-prep"), ran(0, HOUR, job="tune-train-7"), ran(0, 120, job="tune-train-8")]
    present = {"uid-of-tune-prep", "uid-of-tune-train-6"}
    folded = usage(
        JobUsage(uid=EARLIER_JOBS, pod_seconds=5 * HOUR, gpu_seconds=10 * HOUR),
        entry(60, job="tune-prep", until=9000),
        entry(HOUR, 2 * HOUR, job="tune-train-6", until=9000),
        entry(HOUR, 2 * HOUR, job="tune-train-7", until=9000),
        entry(120, job="tune-train-8", until=9000),
    )
    assert add_usage(before, pods, present, at=later(9000), final=False, resource=GPU) == folded
    assert add_usage(folded, pods, present, at=later(9000), final=False, resource=GPU) == folded


def test_preparation_and_training_are_in_the_status() -> None:
    before = running(usage=usage(entry(900, job="tune-prep", until=0)))
    observation = observed(child(JOB), pods=[runs(0, gpus=4), runs(1, gpus=4)])
    total = conclude(ftj(before), observation, at=later(HOUR)).status.usage
    assert total == usage(entry(900, job="tune-prep", until=0), entry(2 * HOUR, 8 * HOUR, until=HOUR))


def test_between_two_steps_nothing_is_written() -> None:
    observation = observed(child(JOB), pods=[runs(0), runs(1)])
    first = conclude(ftj(running()), observation, at=later(601)).status
    assert conclude(ftj(first), observation, at=later(1199)).status == first
    assert conclude(ftj(first), observation, at=later(1200)).status.usage == usage(entry(2400, until=1200))


def test_a_job_that_fails_at_its_deadline_counts_its_pods_until_then() -> None:
    before = status(ACCEPTED, PREPARED, TRAINING, attempt=1, start_time=later(0))
    observation = observed(child(JOB), pods=[runs(0, 10), runs(1, 10)])
    decision = conclude(ftj(before, runPolicy={"activeDeadlineSeconds": 700}), observation, at=later(701))
    assert decision.status.phase == "Failed"
    assert decision.status.usage == usage(entry(1382, until=701))
    again = conclude(
        ftj(decision.status, runPolicy={"activeDeadlineSeconds": 700}), observation, at=later(2000)
    )
    assert again.status.usage == usage(entry(1382, until=701))


def test_a_job_whose_pods_kueue_replaces_counts_all_of_them_also_after_a_restart_of_the_operator() -> None:
    total = None
    for hours, pods in ((10, [runs(0, gpus=8)]), (11, []), (13, [runs(0, 12 * HOUR, gpus=8)])):
        total = add_usage(total, pods, set(), at=later(hours * HOUR), final=False, resource=GPU)
    assert total == usage(entry(11 * HOUR, 88 * HOUR, until=13 * HOUR))


def test_gpus_of_the_resource_that_the_spec_names_count() -> None:
    pod_body = runs(0)
    pod_body["spec"]["containers"][0]["resources"]["limits"]["habana.ai/gaudi"] = "8"
    parts: Json = {"distributed": {"gpusPerNode": 8, "gpu": {"resourceName": "habana.ai/gaudi"}}}
    total = conclude(
        ftj(running(), **parts), observed(child(JOB), pods=[pod_body]), at=later(HOUR)
    ).status.usage
    assert total == usage(entry(HOUR, 8 * HOUR, until=HOUR))
