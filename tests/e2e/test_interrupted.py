"""A job that is suspended, and then loses a pod: each next attempt goes on, at no cost to maxRestarts."""

from __future__ import annotations

from dataclasses import dataclass

from demo.kubectl import Json
from e2e.jobs import condition, on_prepared_splits, steps
from e2e.stories import Stage

STEPS = 100


@dataclass(frozen=True)
class Interruptions:
    """What was seen of the job.

    Attributes:
        suspended, ended: its status while it was suspended, and at the end.
        steps: those that the logs of the second and the third attempt report.
        step_before_loss: a step that was done before a pod was deleted.
    """

    suspended: Json
    ended: Json
    steps: dict[int, list[int]]
    step_before_loss: int


def run_story(stage: Stage) -> Interruptions:
    """Suspend the job, let it go on, and delete one of its pods."""
    stage.quickstart()
    jobs = stage.jobs
    job = on_prepared_splits("interrupted", maxSteps=STEPS, logEverySteps=1)
    # No checkpoint but those that SIGTERM causes.
    job["spec"]["checkpoint"]["everySteps"] = 1000
    job["spec"]["runPolicy"] = {"maxRestarts": 0}
    name = jobs.apply(job)

    jobs.until(name, "its seventh step", lambda status: step(status) > 6)
    jobs.suspend(name, value=True)
    suspended = jobs.until(
        name,
        "being suspended",
        lambda status: status.get("phase") == "Suspended" and not jobs.pods(name),
        seconds=180,
    )["status"]
    jobs.suspend(name, value=False)

    # More steps than those that the status did not know of yet when the pods stopped.
    enough = step(suspended) + 12
    jobs.until(
        name, "new steps", lambda status: status.get("attempt") == 2 and step(status) > enough, seconds=600
    )
    second_attempt = steps(jobs.logs(name, attempt=2))
    second = next(pod for pod in jobs.pods(name) if pod.startswith(f"{name}-train-2-1-"))
    # Rank 0 is in the other pod, which the peers tell of the signal.
    jobs.kubectl("delete", "pod", second, "--namespace", "demo", "--wait=false")

    ended = jobs.ended(name, seconds=600)
    attempts = {2: second_attempt, 3: steps(jobs.logs(name, attempt=3))}
    return Interruptions(suspended, ended, attempts, enough)


def test_goes_on_from_where_it_was_stopped(story: Interruptions) -> None:
    assert story.suspended["nodes"]["summary"] == "0/0"
    status = story.ended
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 3, 0)
    assert status["progress"]["step"] == STEPS
    assert min(story.steps[2]) > 6
    failure = status["lastFailure"]
    assert (failure["exitCode"], failure["attempt"]) == (75, 2)
    assert min(story.steps[3]) == failure["checkpointStep"] + 1 > story.step_before_loss
    assert condition(status, "CheckpointStored")["status"] == "True"


def step(status: Json) -> int:
    return int((status.get("progress") or {}).get("step", 0))
