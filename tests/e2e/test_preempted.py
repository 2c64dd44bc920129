"""A pod is taken away: the gang saves and stops, and the next attempt goes on, at no cost to maxRestarts."""

from __future__ import annotations

from e2e.jobs import Jobs, condition, on_prepared_splits, steps

STEPS = 120


def test_goes_on_from_where_it_was_stopped(jobs: Jobs) -> None:
    job = on_prepared_splits("preempted", maxSteps=STEPS, logSteps=1)
    # None but the one that being stopped makes.
    job["spec"]["checkpoint"]["everySteps"] = 1000
    job["spec"]["runPolicy"] = {"maxRestarts": 0}
    name = jobs.apply(job)
    jobs.until(name, "its sixth step", lambda status: (status.get("progress") or {}).get("step", 0) > 5)
    # Not that of rank 0: the other pod hears of it from the peers.
    second = next(child for child in jobs.children(name) if child.startswith(f"pod/{name}-train-1-1-"))
    jobs.kubectl("delete", second, "--namespace", "demo", "--wait=false")
    status = jobs.ended(name, seconds=600)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 0)
    assert status["progress"]["step"] == STEPS
    failure = status["lastFailure"]
    assert (failure["exitCode"], failure["attempt"]) == (75, 1)
    assert min(steps(jobs.logs(name, attempt=2))) == failure["checkpointStep"] + 1 > 6
    assert condition(status, "CheckpointStored")["status"] == "True"
