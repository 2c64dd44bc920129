"""Suspended and taken up again: the second attempt goes on from the checkpoint of the first."""

from __future__ import annotations

import json

from e2e.jobs import Jobs, on_prepared_splits, steps

STEPS = 100


def suspend(jobs: Jobs, name: str, *, value: bool) -> None:
    patch = json.dumps({"spec": {"suspend": value}})
    jobs.kubectl("patch", "ftj", name, "--namespace", "demo", "--type", "merge", "--patch", patch)


def test_goes_on_from_the_checkpoint(jobs: Jobs) -> None:
    job = on_prepared_splits("paused", maxSteps=STEPS, logSteps=1)
    job["spec"]["checkpoint"]["everySteps"] = 5
    name = jobs.apply(job)
    jobs.until(name, "a checkpoint", lambda status: (status.get("progress") or {}).get("step", 0) > 6)
    suspend(jobs, name, value=True)
    suspended = jobs.until(
        name,
        "being suspended",
        lambda status: status.get("phase") == "Suspended" and not running(jobs, name),
        seconds=180,
    )
    assert suspended["status"]["nodes"]["summary"] == "0/0"
    suspend(jobs, name, value=False)
    status = jobs.ended(name, seconds=600)
    assert (status["phase"], status["attempt"], status["progress"]["step"]) == ("Succeeded", 2, STEPS)
    first = min(steps(jobs.logs(name, attempt=2)))
    assert first > 5


def running(jobs: Jobs, name: str) -> list[str]:
    return [child for child in jobs.children(name) if child.startswith("pod/")]
