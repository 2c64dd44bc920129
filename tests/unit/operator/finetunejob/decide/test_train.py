"""Training: one Indexed Job an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage, TrainResult
from finetune_crds.status import LastFailure, ModelStatus, Nodes, Progress
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    NOW,
    PREPARED,
    SETTINGS,
    TRAINED,
    applied,
    child,
    conclude,
    deleted,
    ended,
    ftj,
    observed,
    pod,
    running,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
JOB = "tune-train-1"
RESULT = TerminationMessage(
    train=TrainResult(
        step=100,
        base_eval_loss=5.00001,
        eval_loss=2.0,
        perplexity=7.38906,
        goodput=0.91239,
        productive_seconds=912.4,
    )
)


def test_an_attempt_starts_with_all_its_children() -> None:
    decision = conclude(ftj())
    assert applied(decision) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-1",
    ]
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.STARTING,
        "attempt 1: 2 pods are starting",
    )
    job_status = decision.status
    assert (job_status.phase, job_status.attempt, job_status.restarts, job_status.start_time) == (
        "Starting",
        1,
        0,
        NOW,
    )
    assert job_status.nodes == Nodes(desired=2, ready=0, summary="0/2")


def test_one_pod_is_one_pod() -> None:
    condition = said(conclude(ftj(distributed={"nodes": 1})), ConditionType.TRAINED)
    assert condition == ("False", ConditionReason.STARTING, "attempt 1: 1 pod is starting")


CAUSES: dict[str, tuple[LastFailure | None, str]] = {
    "an error": (
        LastFailure(attempt=1, exit_code=1, message="Traceback\n  File\nValueError: it blew up\n"),
        "; attempt 1 ended with exit code 1: ValueError: it blew up",
    ),
    "no pod left": (
        LastFailure(attempt=1, reason="PodFailurePolicy"),
        "; attempt 1 failed: PodFailurePolicy",
    ),
    "an earlier one": (LastFailure(attempt=0, exit_code=1, message="preparation"), ""),
    "nothing": (None, ""),
}


@pytest.mark.parametrize(("failure", "ending"), CAUSES.values(), ids=CAUSES)
def test_an_attempt_that_starts_says_why_the_one_before_ended(
    failure: LastFailure | None, ending: str
) -> None:
    before = running(attempt=2, restarts=1, last_failure=failure)
    started = said(conclude(ftj(before)), ConditionType.TRAINED)
    assert started == ("False", ConditionReason.STARTING, f"attempt 2: 2 pods are starting{ending}")
    followed = said(conclude(ftj(before), observed(child("tune-train-2"))), ConditionType.TRAINED)
    assert followed == ("False", ConditionReason.STARTING, f"attempt 2: 0 of 2 pods are ready{ending}")


def test_an_attempt_waits_for_the_pods_of_the_one_before() -> None:
    before = running(attempt=2, restarts=1)
    leaving = pod(JOB, 1, node="node-1")
    decision = conclude(ftj(before), observed(child(JOB, "Failed"), pods=[ended(JOB, 0, 1), leaving]))
    assert applied(decision) == []
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        "attempt 2 waits for pod tune-train-1-1-abcde on node node-1 of the previous attempt to stop",
    )
    assert (decision.status.phase, decision.requeue_seconds) == ("Starting", 5.0)


def test_pods_of_an_earlier_attempt_that_find_themselves_replaced_do_not_affect_the_current_one() -> None:
    before = running(attempt=2, restarts=1)
    jobs = child(JOB, "Failed"), child("tune-train-2")
    current = [pod("tune-train-2", index) for index in range(2)]
    superseded = TerminationMessage(
        error=PodError(reason="Superseded", message="newer pods claimed the checkpoint folder"),
        checkpoint_step=40,
    )
    replaced = [ended(JOB, index, 75, superseded) for index in range(2)]
    checkpoint = {"uri": "/checkpoints"}
    alone = conclude(ftj(before, checkpoint=checkpoint), observed(*jobs, pods=current))
    beside = conclude(ftj(before, checkpoint=checkpoint), observed(*jobs, pods=[*replaced, *current]))
    assert beside == alone
    assert said(beside, ConditionType.TRAINED) == (
        "False",
        ConditionReason.TRAINING,
        "attempt 2 runs on 2 pods; kubectl logs job/tune-train-2 shows its progress",
    )


def test_an_attempt_whose_child_vanished_starts_again_under_its_number() -> None:
    decision = conclude(ftj(running(attempt=3)))
    assert (applied(decision)[-1], decision.status.attempt) == ("Job/tune-train-3", 3)


def test_only_the_last_attempts_are_kept() -> None:
    jobs = [child(f"tune-train-{number}", "Failed") for number in range(1, 6)]
    decision = conclude(ftj(running(attempt=6)), observed(child("tune-prep", "Complete"), *jobs))
    assert deleted(decision) == ["tune-train-1", "tune-train-2"]
    assert applied(decision)[-1] == "Job/tune-train-6"


FOLLOWED: dict[str, tuple[list[Json], int, str, str]] = {
    "no pod yet": ([], 0, ConditionReason.STARTING, "attempt 1: 0 of 2 pods are ready"),
    "one pod runs": (
        [pod(JOB, 0), pod(JOB, 1, "Pending", ready=False)],
        1,
        ConditionReason.STARTING,
        "attempt 1: 1 of 2 pods are ready",
    ),
    "all pods run": (
        [pod(JOB, 0), pod(JOB, 1)],
        2,
        ConditionReason.TRAINING,
        "attempt 1 runs on 2 pods; kubectl logs job/tune-train-1 shows its progress",
    ),
    "one pod is done already": (
        [ended(JOB, 0, 0), pod(JOB, 1)],
        2,
        ConditionReason.TRAINING,
        "attempt 1 runs on 2 pods; kubectl logs job/tune-train-1 shows its progress",
    ),
    "a pod was replaced": (
        [pod(JOB, 0), pod(JOB, 1), pod(JOB, 1)],
        2,
        ConditionReason.TRAINING,
        "attempt 1 runs on 2 pods; kubectl logs job/tune-train-1 shows its progress",
    ),
}


@pytest.mark.parametrize(("pods", "ready", "reason", "message"), FOLLOWED.values(), ids=FOLLOWED)
def test_an_attempt_is_followed(pods: list[Json], ready: int, reason: str, message: str) -> None:
    decision = conclude(ftj(running()), observed(child(JOB), pods=pods))
    assert said(decision, ConditionType.TRAINED) == ("False", reason, message)
    assert decision.status.nodes == Nodes(desired=2, ready=ready, summary=f"{ready}/2")
    assert (applied(decision), decision.requeue_seconds) == ([], 5.0)


def test_a_gang_of_one_is_one_pod() -> None:
    of_one = ftj(running(), distributed={"nodes": 1})
    decision = conclude(of_one, observed(child(JOB), pods=[pod(JOB, 0)]))
    message = "attempt 1 runs on 1 pod; kubectl logs job/tune-train-1 shows its progress"
    assert said(decision, ConditionType.TRAINED) == ("False", ConditionReason.TRAINING, message)


def test_an_attempt_ends_with_what_rank_0_reports() -> None:
    before = running(
        progress=Progress(step=95, max_steps=100, percent=95, summary="95%", loss=2.25, eta="9s")
    )
    observation = observed(
        child(JOB, "Complete"), pods=[ended(JOB, 1, 0, at=1), ended(JOB, 0, 0, RESULT, at=2)]
    )
    decision = conclude(ftj(before), observation)
    assert said(decision, ConditionType.TRAINED) == (
        "True",
        ConditionReason.TRAINED,
        "attempt 1 completed",
    )
    job_status = decision.status
    assert job_status.model == ModelStatus(base_eval_loss=5.0, eval_loss=2.0, perplexity=7.3891)
    assert (job_status.goodput, job_status.productive_seconds) == (0.9124, 912)
    assert job_status.progress == Progress(
        step=100, max_steps=100, percent=100, summary="100%", loss=2.25, seconds_remaining=0
    )
    assert job_status.phase == "Succeeded"


@pytest.mark.parametrize(
    ("registered", "summary"),
    [(None, "gs://models/tune"), ({"model": "tune"}, None)],
    ids=["alone", "beside"],
)
def test_the_folder_of_the_model_is_known_at_the_end(registered: Json | None, summary: str | None) -> None:
    """Also where the message of rank 0 is lost."""
    job = ftj(running(), output={"uri": "gs://models/tune"}, register=registered)
    observation = observed(child(JOB, "Complete"), pods=[ended(JOB, 0, 0), ended(JOB, 1, 0)])
    assert conclude(job, observation).status.model == ModelStatus(folder="gs://models/tune", summary=summary)


def test_an_attempt_of_a_script_that_reports_nothing_ends_too() -> None:
    observation = observed(
        child(JOB, "Complete"), pods=[ended(JOB, 0, 0, "the end of its log"), ended(JOB, 1, 0)]
    )
    decision = conclude(ftj(running()), observation)
    assert (decision.status.phase, decision.status.model) == ("Succeeded", None)


def test_results_that_are_no_numbers_are_left_out() -> None:
    text = '{"train": {"step": 3, "evalLoss": NaN, "perplexity": Infinity, "goodput": NaN}}'
    decision = conclude(ftj(running()), observed(child(JOB, "Complete"), pods=[ended(JOB, 0, 0, text)]))
    assert (decision.status.phase, decision.status.model) == ("Succeeded", None)
    assert decision.status.goodput is None


def test_what_was_trained_is_not_trained_again_whatever_is_left_of_it() -> None:
    before = status(ACCEPTED, PREPARED, TRAINED, attempt=1)
    decision = conclude(ftj(before, register={"model": "m"}), observed(mlflow=tracked()), settings=SETTINGS)
    assert (applied(decision), decision.status.phase) == ([], "Registering")
