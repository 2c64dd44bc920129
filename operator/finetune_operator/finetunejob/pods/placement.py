"""The nodes on which the pods of an attempt run."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.status import Nodes
from finetune_crds.status_parts import MAX_PODS, PlacedPod
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.pods import pod_state


def summarize_nodes(attempt_pods: Sequence[Json], *, desired: int) -> Nodes:
    """Summarize how many pods are ready, and where the first MAX_PODS pods that have a node run.

    NB: pods without a node are left out. With them, the status of a gang would be written when its pods are created, and again when they
    get their nodes.

    Args:
        attempt_pods: in the order of their node ranks.
        desired: pods of the attempt.
    """
    ready = min(pod_state.count_ready(attempt_pods), desired)
    placed = [_place_pod(pod) for pod in attempt_pods if pod.get("spec", {}).get("nodeName")]
    return Nodes(
        desired=desired, ready=ready, summary=f"{ready}/{desired}", pods=placed[:MAX_PODS] if placed else None
    )


def _place_pod(pod: Json) -> PlacedPod:
    return PlacedPod(
        name=pod["metadata"]["name"],
        node=pod["spec"]["nodeName"],
        node_rank=children.node_rank(pod),
        ready=pod_state.is_ready(pod),
    )
