"""What the demo prints of a job."""

from __future__ import annotations

from typing import Any

import pytest

from demo.follow import complaints, failure, line, progress_state

Json = dict[str, Any]

LINES: dict[str, tuple[Json, str]] = {
    "nothing known": ({}, "Pending"),
    "preparing": ({"phase": "Preparing", "nodes": {"desired": 0, "ready": 0}}, "Preparing"),
    "preparing, with a step": (
        {"phase": "Preparing", "progress": {"step": 0, "summary": "writing 88%"}},
        "Preparing    writing 88%",
    ),
    "starting": (
        {
            "phase": "Starting",
            "nodes": {"desired": 2, "ready": 1},
            "data": {"rows": {"train": 900, "validation": 50, "test": 50}},
        },
        "Starting     nodes 1/2  900 rows to train on, 50 to evaluate on",
    ),
    "training": (
        {
            "phase": "Training",
            "progress": {
                "step": 60,
                "maxSteps": 240,
                "percent": 25,
                "loss": 4.3217,
                "evalLoss": 5.0,
                "tokensPerSecond": 12345.6,
                "secondsRemaining": 95,
            },
        },
        "Training     [######------------------]  25%  step 60/240  loss 4.32  eval 5.00  12,346 tok/s  1:35 to go",
    ),
}


@pytest.mark.parametrize(("status", "text"), LINES.values(), ids=LINES)
def test_line(status: Json, text: str) -> None:
    assert line({"status": status}) == text


def condition(kind: str, status: str, reason: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": f"about {kind}"}


def test_complaints_are_what_is_wrong_and_not_what_is_yet_to_come() -> None:
    conditions = [
        condition("Ready", "False", "Running"),
        condition("Accepted", "True", "Accepted"),
        condition("Tracked", "False", "MlflowUnreachable"),
        condition("Prepared", "False", "Preparing"),
        condition("PodsHealthy", "False", "ImagePullFailed"),
        condition("Succeeded", "False", "Training"),
    ]
    assert complaints({"status": {"conditions": conditions}}) == [
        "MlflowUnreachable: about Tracked",
        "ImagePullFailed: about PodsHealthy",
    ]


def test_failure_says_why_and_where() -> None:
    status = {
        "conditions": [condition("Failed", "True", "RecipeWrong")],
        "lastFailure": {"pod": "x-train-1-0", "rank": 1, "exitCode": 64},
    }
    job = {"metadata": {"name": "x"}, "status": status}
    assert failure(job) == "x failed: about Failed (pod x-train-1-0, rank 1, exit code 64)"


TRAINING: Json = {
    "phase": "Training",
    "attempt": 1,
    "progress": {"step": 5, "maxSteps": 100, "summary": "5%", "updateTime": "12:00:00"},
    "nodes": {"desired": 2, "ready": 2},
    "conditions": [condition("PodsHealthy", "True", "PodsRunning")],
}
CHANGES: dict[str, tuple[Json, bool]] = {
    "nothing": ({}, False),
    "the estimate of the time left": (
        {"progress": {"step": 5, "maxSteps": 100, "summary": "5%", "secondsRemaining": 9}},
        False,
    ),
    "a step": ({"progress": {"step": 6, "maxSteps": 100, "summary": "6%"}}, True),
    "the phase": ({"phase": "Registering"}, True),
    "the attempt": ({"attempt": 2}, True),
    "the pods": ({"nodes": {"desired": 2, "ready": 1}}, True),
    "a condition": ({"conditions": [condition("PodsHealthy", "False", "ImagePullFailed")]}, True),
}


@pytest.mark.parametrize(("change", "is_progress"), CHANGES.values(), ids=CHANGES)
def test_what_is_progress_of_a_job(change: Json, is_progress: bool) -> None:
    before, after = ({"status": status} for status in (TRAINING, TRAINING | change))
    assert (progress_state(before) != progress_state(after)) is is_progress
