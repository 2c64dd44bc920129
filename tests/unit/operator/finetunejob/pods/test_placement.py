"""Where the pods of an attempt run."""

from __future__ import annotations

from typing import Any

from finetune_crds.status import Nodes
from finetune_crds.status_parts import MAX_PODS, PlacedPod
from finetune_operator.finetunejob.pods import placement
from fixtures.operator_in_memory.decisions import child, conclude, ended, ftj, observed, pod, running

Json = dict[str, Any]
JOB = "tune-train-1"


def placed(index: int, node: str, *, ready: bool) -> PlacedPod:
    return PlacedPod(name=f"{JOB}-{index}-abcde", node=node, node_rank=index, ready=ready)


def test_pods_are_listed_by_rank_once_they_have_a_node() -> None:
    pods = [
        ended(JOB, 2, 0, node="node-2"),
        pod(JOB, 1, "Pending", ready=False, node="node-2"),
        pod(JOB, 0, node="node-1"),
        pod(JOB, 3, "Pending", ready=False),
    ]
    status = conclude(ftj(running(), distributed={"nodes": 4}), observed(child(JOB), pods=pods)).status
    assert status.nodes == Nodes(
        desired=4,
        ready=2,
        summary="2/4",
        pods=[
            placed(0, "node-1", ready=True),
            placed(1, "node-2", ready=False),
            placed(2, "node-2", ready=True),
        ],
    )


def test_pods_without_a_node_change_nothing() -> None:
    assert placement.summarize_nodes([], desired=2) == Nodes(desired=2, ready=0, summary="0/2")
    waiting = [pod(JOB, index, "Pending", ready=False) for index in range(2)]
    assert placement.summarize_nodes(waiting, desired=2) == Nodes(desired=2, ready=0, summary="0/2")


def test_of_many_pods_the_first_are_listed_and_all_are_counted() -> None:
    pods = [pod(JOB, index, node=f"node-{index}") for index in range(MAX_PODS + 6)]
    nodes = placement.summarize_nodes(pods, desired=MAX_PODS + 6)
    assert (nodes.ready, nodes.summary) == (MAX_PODS + 6, "70/70")
    assert [item.node_rank for item in nodes.pods or []] == [*range(MAX_PODS)]


def test_pods_of_the_attempt_before_are_not_listed() -> None:
    before = running(attempt=2, restarts=1, nodes=Nodes(desired=2, ready=2, summary="2/2", pods=[]))
    decision = conclude(ftj(before), observed(child(JOB, "Failed"), pods=[ended(JOB, 0, 1, node="node-1")]))
    assert decision.status.nodes == Nodes(desired=2, ready=0, summary="0/2")
