"""What goes wrong is said, where people look, in time; and nothing stays behind."""

from __future__ import annotations

import pytest

from e2e.jobs import Jobs, condition, on_prepared_splits
from support.waiting import wait_for

MISSING = "s3://finetune/models/nowhere"
IMAGE = "registry.invalid/no-such-image:1"


@pytest.fixture(scope="module")
def applied(jobs: Jobs) -> Jobs:
    """The jobs of this module, all at once."""
    no_model = on_prepared_splits("no-model", maxSteps=10)
    no_model["spec"]["model"]["base"] = MISSING
    no_image = on_prepared_splits("no-image", maxSteps=10)
    no_image["spec"]["trainer"] = {"image": IMAGE}
    for job in (no_image, no_model, on_prepared_splits("deleted", maxSteps=100_000)):
        jobs.apply(job)
    return jobs


def test_image_that_cannot_be_pulled_is_named_within_a_minute(applied: Jobs) -> None:
    found = applied.until(
        "no-image",
        "a condition about the image",
        lambda status: condition(status, "PodsHealthy").get("reason") == "ImagePullFailed",
        seconds=60,
    )
    message = condition(found["status"], "PodsHealthy")["message"]
    assert "no-image-train-1-" in message
    assert IMAGE in message


def test_missing_model_fails_the_job_at_once(applied: Jobs) -> None:
    status = applied.ended("no-model")
    assert (status["phase"], status.get("restarts", 0)) == ("Failed", 0)
    assert status["lastFailure"]["exitCode"] == 64
    assert status["lastFailure"]["reason"] == "ModelNotFound"
    assert MISSING in status["lastFailure"]["message"]
    assert MISSING in condition(status, "Failed")["message"]


def test_job_deleted_while_it_trains_leaves_nothing(applied: Jobs) -> None:
    applied.until("deleted", "training", lambda status: status.get("phase") == "Training")
    assert applied.children("deleted")
    applied.kubectl("delete", "ftj", "deleted", "--namespace", "demo", "--wait=false")
    wait_for(
        "nothing is left",
        lambda: not applied.children("deleted"),
        150,
        instead=lambda: applied.children("deleted"),
    )
