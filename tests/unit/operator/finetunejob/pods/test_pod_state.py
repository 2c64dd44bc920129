"""What pods say: their ends, and the failure that came first."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import LastFailure
from finetune_operator.batch.state import describe_pods
from finetune_operator.finetunejob.children import ComponentChildren, pods_of_job
from finetune_operator.finetunejob.pods import pod_state
from fixtures.operator_in_memory.decisions import (
    EVICTED,
    child,
    ended,
    pod,
)

Json = dict[str, Any]
JOB = "tune-train-1"


def error(reason: str, message: str, rank: int | None = None) -> TerminationMessage:
    return TerminationMessage(error=PodError(reason=reason, message=message, rank=rank))


PEER_LOST = error("PeerLost", "rank 3 is gone")
BOOM = error("Boom", "rank 3 blew up", rank=3)


def lost(index: int, reason: str, message: str, **more: Any) -> Json:
    """A pod that ended without any container having ended."""
    return pod(JOB, index, "Failed", reason=reason, message=message, startTime="", **more)


def waiting_for_init(code: int, message: str, reason: str = "Error", name: str = "fetch") -> Json:
    terminated = {"exitCode": code, "message": message, "reason": reason}
    init = {"name": name, "state": {"terminated": terminated}}
    main = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    return pod(JOB, 0, "Failed", containerStatuses=[main], initContainerStatuses=[init])


FAILURES: dict[str, tuple[list[Json], tuple[Any, ...] | None]] = {
    "none": ([], None),
    "none failed": ([ended(JOB, 0, 0), pod(JOB, 1)], None),
    "one that only lost its peer loses against the cause": (
        [ended(JOB, 0, 1, PEER_LOST, at=0), ended(JOB, 1, 1, BOOM, at=5)],
        ("tune-train-1-1-abcde", 3, 1, "Boom", "rank 3 blew up"),
    ),
    "one that only lost its peer loses against one without words": (
        [ended(JOB, 0, 1, PEER_LOST, at=0), ended(JOB, 1, 137, reason="OOMKilled", at=5)],
        (
            "tune-train-1-1-abcde",
            None,
            137,
            "OOMKilled",
            "the container used more memory than its limit: raise the limit",
        ),
    ),
    "where all lost their peers the earliest counts": (
        [ended(JOB, 0, 1, PEER_LOST, at=5), ended(JOB, 1, 1, error("PeerLost", "rank 0 is gone"), at=1)],
        ("tune-train-1-1-abcde", None, 1, "PeerLost", "rank 0 is gone"),
    ),
    "one with words outweighs an earlier one without": (
        [ended(JOB, 0, 134, "core dumped", at=0), ended(JOB, 1, 1, BOOM, at=5)],
        ("tune-train-1-1-abcde", 3, 1, "Boom", "rank 3 blew up"),
    ),
    "without words the earliest counts": (
        [ended(JOB, 0, 1, "ValueError: late", at=5), ended(JOB, 1, 2, "KeyError: early", at=1)],
        ("tune-train-1-1-abcde", None, 2, "Error", "KeyError: early"),
    ),
    "the last lines of a log": (
        [ended(JOB, 0, 1, "\n".join(f"line {number}" for number in range(20)))],
        (
            "tune-train-1-0-abcde",
            None,
            1,
            "Error",
            "\n".join(f"line {number}" for number in range(12, 20)),
        ),
    ),
    "nothing was said": (
        [ended(JOB, 1, 139)],
        (
            "tune-train-1-1-abcde",
            None,
            139,
            "Error",
            "the container ended with exit code 139 and no message: see kubectl logs tune-train-1-1-abcde",
        ),
    ),
    "the node evicted it": (
        [lost(0, "Evicted", "The node was low on resource: memory.", conditions=EVICTED)],
        ("tune-train-1-0-abcde", None, 137, "Evicted", "The node was low on resource: memory."),
    ),
    "it was evicted while it ran": (
        [ended(JOB, 0, 143, "stopping", conditions=EVICTED)],
        ("tune-train-1-0-abcde", None, 143, "Evicted", "stopping"),
    ),
    "an init container failed, and says why": (
        [waiting_for_init(65, error("NoVersion", "there is no version 4").dump())],
        ("tune-train-1-0-abcde", None, 65, "NoVersion", "init container fetch: there is no version 4"),
    ),
    "an init container of the operator had no memory": (
        [waiting_for_init(137, "", "OOMKilled", "checkout")],
        (
            "tune-train-1-0-abcde",
            None,
            137,
            "OOMKilled",
            "init container checkout used more memory than its limit: it has the limit of the container trainer: raise that limit",
        ),
    ),
    "one of your own had no memory": (
        [waiting_for_init(137, "", "OOMKilled", "mine")],
        (
            *("tune-train-1-0-abcde", None, 137, "OOMKilled"),
            "init container mine used more memory than its limit: raise the limit",
        ),
    ),
    "an init container says nothing": (
        [waiting_for_init(3, "")],
        (
            *("tune-train-1-0-abcde", None, 3, "Error"),
            "init container fetch ended with exit code 3 and no message: see kubectl logs tune-train-1-0-abcde -c fetch",
        ),
    ),
    "an init container failed": (
        [waiting_for_init(3, "no such bucket")],
        ("tune-train-1-0-abcde", None, 3, "Error", "init container fetch: no such bucket"),
    ),
}


@pytest.mark.parametrize(("pods", "expected"), FAILURES.values(), ids=FAILURES)
def test_first_failure(pods: list[Json], expected: tuple[Any, ...] | None) -> None:
    failure = pod_state.first_failure(pods, "trainer", attempt=4, ranks_per_node=2)
    if expected is None:
        assert failure is None
        return
    pod_name, rank, code, reason, message = expected
    assert failure == LastFailure(
        pod=pod_name, rank=rank, exit_code=code, reason=reason, message=message, attempt=4
    )


def test_a_pod_whose_node_was_deleted_is_lost_with_it() -> None:
    # NB: the pod garbage collector marks the pod as failed. The states of its containers stay as the kubelet wrote them last.
    reason = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]
    running = [{"name": "trainer", "state": {"running": {}}}]
    body = pod(JOB, 0, "Failed", node="n", conditions=reason, containerStatuses=running)
    assert pod_state.first_failure([body], "trainer", attempt=4) == LastFailure(
        pod="tune-train-1-0-abcde",
        node="n",
        rank=0,
        exit_code=137,
        reason="NodeLost",
        message="node n no longer exists",
        attempt=4,
    )


@pytest.mark.parametrize(
    "text",
    [
        "fatal: https://me:pa55word@host/a.git not found",
        error("BadLogin", "fatal: https://me:pa55word@host/a.git not found"),
    ],
    ids=["the end of a log", "an error that the pod reports"],
)
def test_a_failure_shows_no_credentials(text: str) -> None:
    failure = pod_state.first_failure([ended(JOB, 1, 1, text)], "trainer", attempt=1)
    assert failure is not None
    assert failure.message == "fatal: https://me:***@host/a.git not found"


def test_with_one_rank_a_pod_the_rank_is_the_pods() -> None:
    failure = pod_state.first_failure([ended(JOB, 1, 1)], "trainer", attempt=1, ranks_per_node=1)
    assert failure is not None
    assert failure.rank == 1


def test_a_failure_names_the_node() -> None:
    failure = pod_state.first_failure([ended(JOB, 1, 1, node="node-1")], "trainer", attempt=1)
    assert failure is not None
    assert failure.node == "node-1"
    evicted = lost(0, "Evicted", "The node was low on resource: memory.", node="node-2")
    failure = pod_state.last_failure([evicted], "trainer", attempt=1)
    assert failure is not None
    assert failure.node == "node-2"


def test_the_last_failure_is_the_newest_whatever_the_pods_names() -> None:
    pods = [ended(JOB, 2, 1, "first", at=1), ended(JOB, 0, 65, "last", at=9), ended(JOB, 1, 1, "", at=5)]
    failure = pod_state.last_failure(pods, "trainer", attempt=0)
    assert failure is not None
    assert (failure.exit_code, failure.message) == (65, "last")


def test_pods_belong_to_the_job_with_their_uid() -> None:
    pod_body, older_pod = pod(JOB, 1, owner="new"), pod(JOB, 0, owner="old")
    assert pods_of_job([pod_body, older_pod], child(JOB, uid="new")) == [pod_body]


def test_pods_are_in_the_order_of_their_index() -> None:
    pods = [pod(JOB, index) for index in (10, 2, 0)]
    assert pods_of_job(pods, child(JOB)) == [pods[2], pods[1], pods[0]]


def test_counting() -> None:
    pods = [
        pod(JOB, 0),
        pod(JOB, 1, ready=False),
        pod(JOB, 2, "Pending", ready=False),
        ended(JOB, 3, 0),
        ended(JOB, 4, 1),
    ]
    assert pod_state.count_ready(pods) == 2
    assert pod_state.alive(pods) == pods[:3]


def test_a_person_reads_which_pods_and_where() -> None:
    on_a_node = pod(JOB, 0, node="node-1")
    assert describe_pods([on_a_node]) == "pod tune-train-1-0-abcde on node node-1"
    assert describe_pods([pod(JOB, 0), pod(JOB, 1), pod(JOB, 2)]) == "pod tune-train-1-0-abcde and 2 more"


STALE: dict[str, tuple[list[Json], str]] = {
    "several pods": (
        [pod(JOB, 0, node="node-1"), pod(JOB, 1)],
        "2 pods of the previous attempt to stop: pod tune-train-1-0-abcde on node node-1 and 1 more",
    ),
    "one pod": ([pod(JOB, 0)], "pod tune-train-1-0-abcde of the previous attempt to stop"),
    "a Job without pods": ([], "Job tune-train-1 of the previous attempt to stop"),
}


@pytest.mark.parametrize(("pods", "expected"), STALE.values(), ids=STALE)
def test_the_children_that_an_attempt_waits_for(pods: list[Json], expected: str) -> None:
    component = ComponentChildren(None, [], [child(JOB)], pods, [])
    assert pod_state.describe_stale(component, " of the previous attempt") == expected
