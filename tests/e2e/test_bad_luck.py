"""What goes wrong is said, where people look, and in time."""

from __future__ import annotations

from dataclasses import dataclass

from demo.kubectl import Json
from e2e.jobs import condition, on_prepared_splits
from e2e.stories import Stage

MISSING = "s3://finetune/models/nowhere"
IMAGE = "registry.invalid/no-such-image:1"


@dataclass(frozen=True)
class BadLuck:
    """A status of each job."""

    no_image: Json
    no_model: Json


def run_story(stage: Stage) -> BadLuck:
    """Apply a job without an image and one without a model."""
    stage.quickstart()
    jobs = stage.jobs
    no_model = on_prepared_splits("no-model", maxSteps=10)
    no_model["spec"]["model"]["base"] = MISSING
    no_image = on_prepared_splits("no-image", maxSteps=10)
    no_image["spec"].setdefault("pods", {})["train"] = {"image": IMAGE}
    for job in (no_image, no_model):
        jobs.apply(job)
    # Within a minute.
    image_failed = jobs.until(
        "no-image",
        "a condition about the image",
        lambda status: condition(status, "PodsHealthy").get("reason") == "ImagePullFailed",
        seconds=60,
    )
    jobs.delete("no-image")
    return BadLuck(image_failed["status"], jobs.ended("no-model"))


def test_image_that_cannot_be_pulled_is_named_within_a_minute(story: BadLuck) -> None:
    message = condition(story.no_image, "PodsHealthy")["message"]
    assert "no-image-train-1-" in message
    assert IMAGE in message


def test_missing_model_fails_the_job_at_once(story: BadLuck) -> None:
    status = story.no_model
    assert (status["phase"], status.get("restarts", 0)) == ("Failed", 0)
    assert status["lastFailure"]["exitCode"] == 64
    assert status["lastFailure"]["reason"] == "ModelNotFound"
    assert MISSING in status["lastFailure"]["message"]
    assert MISSING in condition(status, "Failed")["message"]
