"""spec.suspend: stop, keep what is there, go on with a new attempt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import Nodes
from finetune_operator.finetunejob.model import Observed
from fixtures.operator_in_memory.decisions import (
    LEFT,
    NOW,
    PREPARED,
    SOURCE,
    TRAINED,
    applied,
    child,
    conclude,
    condition,
    deleted,
    ended,
    ftj,
    later,
    lost,
    observed,
    pod,
    running,
    said,
    status,
)

PODS = [pod("tune-train-1", 0), pod("tune-train-1", 1)]
SUSPENDED = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
UNHEALTHY = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.UNSCHEDULABLE)


def suspended(**fields: Any) -> Any:
    """The status of a job that was suspended at NOW during its first attempt."""
    before = running(**({"suspend_time": NOW} | fields))
    return before.model_copy(update={"conditions": [*before.conditions, SUSPENDED, UNHEALTHY]})


def test_suspending_stops_the_pods_and_says_which_are_left() -> None:
    decision = conclude(
        ftj(running(nodes=Nodes(desired=2, ready=2, summary="2/2")), suspend=True),
        observed(child("tune-train-1"), pods=PODS),
    )
    assert deleted(decision) == ["tune-train-1"]
    assert said(decision, ConditionType.SUSPENDED) == (
        "True",
        ConditionReason.SUSPENDED,
        "waiting for pod tune-train-1-0-abcde and 1 more to stop",
    )
    assert decision.status.phase == "Suspended"
    assert decision.status.suspend_time == NOW
    assert decision.status.nodes == Nodes(desired=0, ready=0, summary="0/0")


def test_a_suspended_job_does_not_wait_for_a_lost_pod() -> None:
    lost_pod = lost(pod("tune-train-1", 1, node="n"))
    removed = child("tune-train-1", deletionTimestamp="t")
    decision = conclude(ftj(suspended(), suspend=True), observed(removed, pods=[lost_pod]))
    assert said(decision, ConditionType.SUSPENDED) == (
        "True",
        ConditionReason.SUSPENDED,
        f"no pod runs; set suspend to false to resume; pod tune-train-1-1-abcde {LEFT.format('n')}",
    )
    resumed = conclude(ftj(decision.status), observed(removed, pods=[lost_pod]))
    assert applied(resumed)[-1] == "Job/tune-train-2"


def test_suspended_nothing_is_made_and_old_complaints_are_taken_back() -> None:
    decision = conclude(ftj(suspended(), suspend=True), at=later(60))
    assert said(decision, ConditionType.SUSPENDED) == (
        "True",
        ConditionReason.SUSPENDED,
        "no pod runs; set suspend to false to resume",
    )
    assert said(decision, ConditionType.PODS_HEALTHY) == (
        "Unknown",
        ConditionReason.NO_PODS,
        "no pod should run: the job is suspended",
    )
    assert (applied(decision), deleted(decision), decision.status.suspend_time) == ([], [], NOW)


def test_a_job_made_suspended_makes_nothing() -> None:
    decision = conclude(ftj(data=SOURCE, suspend=True))
    assert (applied(decision), decision.status.phase) == ([], "Suspended")


def test_a_child_that_ended_by_itself_stays_to_be_read() -> None:
    done = observed(child("tune-train-1", "Complete"))
    assert deleted(conclude(ftj(running(), suspend=True), done)) == []


RESUMED: dict[str, tuple[Observed, int, list[str]]] = {
    "with a new attempt": (
        observed(),
        2,
        ["Service/tune", "ConfigMap/tune-train", "NetworkPolicy/tune", "Job/tune-train-2"],
    ),
    "with a new attempt that waits for the old Job": (observed(child("tune-train-1")), 2, []),
    "with a new attempt that waits for the old pods": (observed(pods=PODS), 2, []),
    "with the attempt that ended meanwhile": (observed(child("tune-train-1", "Complete")), 1, []),
}


@pytest.mark.parametrize(("observation", "attempt", "children"), RESUMED.values(), ids=RESUMED)
def test_a_job_goes_on(observation: Observed, attempt: int, children: list[str]) -> None:
    decision = conclude(ftj(suspended()), observation, at=later(60))
    assert (decision.status.attempt, applied(decision)) == (attempt, children)
    assert (decision.status.suspend_time, decision.status.restarts) == (None, 0)
    resumed = said(decision, ConditionType.SUSPENDED)
    assert resumed == (
        "False",
        ConditionReason.RESUMED,
        "the job starts from the beginning: spec.checkpoint is not set",
    )


def test_a_job_that_goes_on_has_no_pod_that_is_blocked() -> None:
    decision = conclude(ftj(status(SUSPENDED, PREPARED, UNHEALTHY, suspend_time=NOW)))
    assert said(decision, ConditionType.PODS_HEALTHY) == (
        "True",
        ConditionReason.PODS_RUNNING,
        "no pod is blocked",
    )


def test_a_job_that_had_not_trained_goes_on() -> None:
    decision = conclude(ftj(status(SUSPENDED, PREPARED, suspend_time=NOW)))
    assert said(decision, ConditionType.SUSPENDED) == ("False", ConditionReason.RESUMED, "the job goes on")


def test_an_attempt_that_failed_while_suspended_restarts_once() -> None:
    observation = observed(child("tune-train-1", "Failed"))
    decision = conclude(ftj(suspended()), observation)
    assert (decision.status.attempt, decision.status.restarts) == (2, 1)


def test_what_is_trained_is_not_trained_again() -> None:
    before = status(PREPARED, TRAINED, SUSPENDED, attempt=1, suspend_time=NOW)
    decision = conclude(ftj(before))
    assert (decision.status.attempt, decision.status.phase) == (1, "Succeeded")


def test_the_pods_of_a_training_that_is_complete_stay_counted() -> None:
    nodes = Nodes(desired=2, ready=2, summary="2/2")
    decision = conclude(ftj(status(PREPARED, TRAINED, attempt=1, nodes=nodes), suspend=True))
    assert decision.status.nodes == nodes


def test_taking_it_back_before_the_pods_have_stopped_still_counts_as_a_resume() -> None:
    stopping = conclude(ftj(running(), suspend=True), observed(child("tune-train-1"), pods=PODS))
    decision = conclude(ftj(stopping.status), observed(pods=PODS), at=later(1))
    assert (decision.status.attempt, applied(decision)) == (2, [])


def test_the_checkpoint_that_pods_save_while_they_stop_is_known_when_the_job_goes_on() -> None:
    saved = TerminationMessage(checkpoint_step=30, error=PodError(reason="Preempted", message="SIGTERM"))
    stopping = observed(pods=[ended("tune-train-1", 0, 75, saved), pod("tune-train-1", 1)])
    paused = conclude(ftj(suspended(), checkpoint={"uri": "/c"}, suspend=True), stopping).status
    assert paused.checkpoint is not None
    assert paused.checkpoint.step == 30
    resumed = conclude(ftj(paused, checkpoint={"uri": "/c"}), observed(), at=later(60))
    message = "the job resumes from the newest checkpoint"
    assert said(resumed, ConditionType.SUSPENDED) == ("False", ConditionReason.RESUMED, message)
