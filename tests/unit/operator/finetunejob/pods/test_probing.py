"""An attempt after one that could not start because a server was away: one pod tries, and the others follow it."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import LastFailure
from fixtures.operator_in_memory.decisions import (
    applied,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
)

Json = dict[str, Any]
TRAINER: Json = {"command": ["torchrun", "train.py"], "dependencies": ["trl"]}
CODE: Json = {
    "command": ["torchrun", "train.py"],
    "code": {"git": {"url": "https://git.example.com/a.git"}, "mountPath": "/code"},
}
AWAY = LastFailure(attempt=1, exit_code=69, reason="DependenciesFailed", message="the index does not answer")


def attempt(failure: LastFailure | None, **parts: Any) -> Any:
    """The job at its second attempt."""
    before = running(attempt=2, last_failure=failure, code=CodeStatus(commit="0" * 40))
    return ftj(before, **({"trainer": TRAINER} | parts))


# The job, and the parallelism of its second attempt.
STARTS: dict[str, tuple[Any, int]] = {
    "an index was away": (attempt(AWAY), 1),
    "a Git server was away": (attempt(AWAY, trainer=CODE), 1),
    "the command failed": (attempt(AWAY.model_copy(update={"exit_code": 1})), 2),
    "an earlier attempt": (attempt(AWAY.model_copy(update={"attempt": 0})), 2),
    "no failure": (attempt(None), 2),
    "a command that ends with 69 and needs no server": (
        attempt(AWAY, trainer={"command": ["torchrun", "train.py"]}),
        2,
    ),
    "another scheduler": (
        attempt(AWAY, pods={"train": {"template": {"spec": {"schedulerName": "volcano"}}}}),
        2,
    ),
    "a queue": (attempt(AWAY, runPolicy={"queueName": "gpus"}), 2),
}


@pytest.mark.parametrize(("job", "parallelism"), STARTS.values(), ids=STARTS)
def test_pods_that_an_attempt_begins_with(job: Any, parallelism: int) -> None:
    decision = conclude(job)
    assert applied(decision)[-1] == "Job/tune-train-2"
    body = decision.apply[-1]
    assert (body["spec"]["parallelism"], body["spec"]["completions"]) == (parallelism, 2)


def test_one_pod_needs_no_probe() -> None:
    decision = conclude(attempt(AWAY, distributed={"nodes": 1}))
    assert decision.apply[-1]["spec"]["parallelism"] == 1
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.STARTING,
        "attempt 2: 1 pod is starting; attempt 1 ended with exit code 69: the index does not answer",
    )


INSTALLS = {"initContainerStatuses": [{"name": "dependencies", "state": {"running": {}}}]}
RUNS = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
BESIDE = {"containerStatuses": [{"name": "sidecar", "state": {"running": {}}}]}


@pytest.mark.parametrize(
    ("state", "parallelism", "scaled"),
    [(INSTALLS, 1, []), (BESIDE, 1, []), (RUNS, 1, [2]), (RUNS, 2, [])],
    ids=["it installs", "another container runs", "the command runs", "all pods are there"],
)
def test_the_others_follow_when_the_command_of_the_first_one_runs(
    state: Json, parallelism: int, scaled: list[int]
) -> None:
    job = child("tune-train-2")
    job["spec"]["parallelism"] = parallelism
    decision = conclude(attempt(AWAY), observed(job, pods=[pod("tune-train-2", ready=False, **state)]))
    assert [body["spec"]["parallelism"] for body in decision.scaled] == scaled
    assert [body["metadata"] for body in decision.scaled] == [
        {"name": "tune-train-2", "namespace": "team", "uid": "uid-of-tune-train-2"}
    ] * len(scaled)
    condition = said(decision, ConditionType.TRAINED)
    assert condition is not None
    tries = (
        "attempt 2: 1 of 2 pods starts first, and the others follow when the command of the first pod runs"
    )
    assert condition[2].startswith(tries) == (parallelism == 1)


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]


def test_the_others_follow_too_when_no_node_can_take_the_first_one() -> None:
    job = child("tune-train-2")
    job["spec"]["parallelism"] = 1
    waiting = pod("tune-train-2", phase="Pending", conditions=UNSCHEDULABLE)
    decision = conclude(attempt(AWAY), observed(job, pods=[waiting]))
    assert [body["spec"]["parallelism"] for body in decision.scaled] == [2]


def test_an_attempt_that_began_with_one_pod_does_not_count() -> None:
    began = conclude(attempt(AWAY)).apply[-1]["metadata"]["annotations"]
    failed = child("tune-train-2", "Failed", annotations=began)
    pods = [ended("tune-train-2", 0, 1, "RendezvousTimeoutError")]
    after = conclude(attempt(AWAY, runPolicy={"maxRestarts": 0}), observed(failed, pods=pods)).status
    assert (after.attempt, after.restarts, after.phase) == (3, 0, "Starting")
    all_pods = conclude(ftj(after, trainer=TRAINER), at=later(60)).apply[-1]
    assert (all_pods["metadata"]["name"], all_pods["spec"]["parallelism"]) == ("tune-train-3", 2)
