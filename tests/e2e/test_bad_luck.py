"""What goes wrong is said, where people look, in time; and nothing stays behind."""

from __future__ import annotations

import time

from e2e.jobs import Jobs, condition, on_prepared_splits

MISSING = "s3://finetune/models/nowhere"


def test_missing_model_fails_the_job_at_once(jobs: Jobs) -> None:
    job = on_prepared_splits("no-model", maxSteps=10)
    job["spec"]["model"]["base"] = MISSING
    status = jobs.ended(jobs.apply(job))
    assert (status["phase"], status.get("restarts", 0)) == ("Failed", 0)
    assert status["lastFailure"]["exitCode"] == 64
    assert status["lastFailure"]["reason"] == "ModelNotFound"
    assert MISSING in status["lastFailure"]["message"]
    assert MISSING in condition(status, "Failed")["message"]


def test_image_that_cannot_be_pulled_is_named_within_a_minute(jobs: Jobs) -> None:
    image = "registry.invalid/no-such-image:1"
    job = on_prepared_splits("no-image", maxSteps=10)
    job["spec"]["trainer"]["image"] = image
    found = jobs.until(
        jobs.apply(job),
        "a condition about the image",
        lambda status: condition(status, "PodsHealthy").get("reason") == "ImagePullFailed",
        seconds=60,
    )
    message = condition(found["status"], "PodsHealthy")["message"]
    assert "no-image-train-1-" in message
    assert image in message


def test_job_deleted_while_it_trains_leaves_nothing(jobs: Jobs) -> None:
    name = jobs.apply(on_prepared_splits("deleted", maxSteps=100_000))
    jobs.until(name, "training", lambda status: status.get("phase") == "Training")
    assert jobs.children(name)
    jobs.kubectl("delete", "ftj", name, "--namespace", "demo", "--wait=false")
    deadline = time.monotonic() + 150
    while left := jobs.children(name):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(1)
