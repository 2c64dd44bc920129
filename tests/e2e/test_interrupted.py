"""A job that is suspended, and then loses a pod: each next attempt goes on, at no cost to maxRestarts."""

from __future__ import annotations

import json

from demo.kubectl import Json
from e2e.jobs import Jobs, condition, on_prepared_splits, steps

STEPS = 100


def test_goes_on_from_where_it_was_stopped(jobs: Jobs) -> None:
    job = on_prepared_splits("interrupted", maxSteps=STEPS, logEverySteps=1)
    # No checkpoint but those that SIGTERM causes.
    job["spec"]["checkpoint"]["everySteps"] = 1000
    job["spec"]["runPolicy"] = {"maxRestarts": 0}
    name = jobs.apply(job)

    jobs.until(name, "its seventh step", lambda status: step(status) > 6)
    suspend(jobs, name, value=True)
    suspended = jobs.until(
        name,
        "being suspended",
        lambda status: status.get("phase") == "Suspended" and not running(jobs, name),
        seconds=180,
    )
    assert suspended["status"]["nodes"]["summary"] == "0/0"
    suspend(jobs, name, value=False)

    # More steps than those that the status did not know of yet when the pods stopped.
    enough = step(suspended["status"]) + 12
    jobs.until(
        name, "new steps", lambda status: status.get("attempt") == 2 and step(status) > enough, seconds=600
    )
    first = min(steps(jobs.logs(name, attempt=2)))
    second = next(child for child in running(jobs, name) if child.startswith(f"pod/{name}-train-2-1-"))
    # Rank 0 is in the other pod, which the peers tell of the signal.
    jobs.kubectl("delete", second, "--namespace", "demo", "--wait=false")

    status = jobs.ended(name, seconds=600)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 3, 0)
    assert status["progress"]["step"] == STEPS
    assert first > 6
    failure = status["lastFailure"]
    assert (failure["exitCode"], failure["attempt"]) == (75, 2)
    assert min(steps(jobs.logs(name, attempt=3))) == failure["checkpointStep"] + 1 > enough
    assert condition(status, "CheckpointStored")["status"] == "True"


def step(status: Json) -> int:
    return int((status.get("progress") or {}).get("step", 0))


def suspend(jobs: Jobs, name: str, *, value: bool) -> None:
    patch = json.dumps({"spec": {"suspend": value}})
    jobs.kubectl("patch", "ftj", name, "--namespace", "demo", "--type", "merge", "--patch", patch)


def running(jobs: Jobs, name: str) -> list[str]:
    return [child for child in jobs.children(name) if child.startswith("pod/")]
