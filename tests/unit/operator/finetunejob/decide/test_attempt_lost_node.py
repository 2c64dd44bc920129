"""What follows an attempt that lost a node."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import JobUids, LastFailure
from finetune_operator.finetunejob.decision import Deletion
from fixtures.operator_in_memory.decisions import (
    LEFT,
    NOW,
    applied,
    child,
    conclude,
    deleted,
    deleted_at,
    ended,
    ftj,
    later,
    lost,
    observed,
    pod,
    running,
    said,
)

JOB = "tune-train-1"
BOOM = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
LOST_POD = lost(pod(JOB, 1, node="n"))
NODE_LOST = (
    f"attempt 1 lost a node and does not count as a restart; pod tune-train-1-1-abcde {LEFT.format('n')}"
)


def test_a_lost_node_restarts_the_gang_elsewhere_and_does_not_count() -> None:
    decision = conclude(
        ftj(running(), runPolicy={"maxRestarts": 0}), observed(child(JOB), pods=[pod(JOB, 0), LOST_POD])
    )
    after = decision.status
    assert (after.attempt, after.restarts, deleted(decision), applied(decision)) == (2, 0, [JOB], [])
    assert after.last_failure == LastFailure(
        pod="tune-train-1-1-abcde",
        node="n",
        reason="NodeLost",
        message=f"pod tune-train-1-1-abcde {LEFT.format('n')}",
        attempt=1,
    )
    assert [item.cause for item in after.attempts or []] == ["NodeLost"]
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        f"{NODE_LOST}; at 12:00:10 UTC, attempt 2 starts from the beginning: spec.checkpoint is not set",
    )
    removed = child(JOB, deletionTimestamp="t")
    waiting = conclude(ftj(after), observed(removed, pods=[pod(JOB, 0), LOST_POD]), at=later(10))
    assert (applied(waiting), deleted(waiting)) == ([], [])
    assert said(waiting, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        "attempt 2 waits for pod tune-train-1-0-abcde of the previous attempt to stop",
    )
    started = conclude(ftj(waiting.status), observed(removed, pods=[LOST_POD]), at=later(12))
    assert (applied(started)[-1], started.delete) == (
        "Job/tune-train-2",
        (Deletion(JOB, "uid-of-tune-train-1", frees_name=True),),
    )


def test_nodes_that_are_lost_again_and_again_without_progress_fail_the_job() -> None:
    before = running(no_progress_since=NOW)
    decision = conclude(
        ftj(before, runPolicy={"restartWindowSeconds": 60}),
        observed(child(JOB), pods=[pod(JOB, 0), LOST_POD]),
        at=later(60),
    )
    failed = said(decision, ConditionType.FAILED)
    assert failed is not None
    assert (failed[1], failed[2].startswith(NODE_LOST)) == (ConditionReason.NO_PROGRESS, True)


def test_a_lost_node_is_recorded_also_when_the_status_could_not_be_written_before_its_job_was_deleted() -> (
    None
):
    recorded = JobUids(train="uid-of-tune-train-1", train_attempt=1)
    decision = conclude(
        ftj(running(jobs=recorded)), observed(child(JOB, deletionTimestamp="t"), pods=[LOST_POD])
    )
    after = decision.status
    assert after.last_failure is not None
    assert (after.attempt, after.restarts, after.last_failure.reason, after.last_failure.node) == (
        *(2, 0),
        *("NodeLost", "n"),
    )


def test_a_crash_counts_although_a_pod_of_the_gang_is_lost() -> None:
    pods = [ended(JOB, 0, 1, BOOM), LOST_POD]
    decision = conclude(ftj(running()), observed(child(JOB, "FailureTarget"), pods=pods))
    assert decision.status.last_failure is not None
    assert (decision.status.restarts, decision.status.last_failure.reason) == (1, "Boom")
    again = conclude(ftj(decision.status), observed(child(JOB, "FailureTarget"), pods=pods))
    assert (deleted(again), applied(again)) == ([JOB], [])


def test_the_attempt_is_looked_at_again_when_a_pod_counts_as_lost() -> None:
    stopping = deleted_at(0, pod(JOB, 1, node="n"))
    decision = conclude(ftj(running()), observed(child(JOB), pods=[pod(JOB, 0), stopping]), at=later(128))
    assert (decision.status.attempt, decision.requeue_seconds) == (1, 2.0)
