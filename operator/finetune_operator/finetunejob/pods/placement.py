"""The nodes on which the pods of an attempt run."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.status import Nodes
from finetune_crds.status_parts import MAX_PODS, PlacedPod
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.pods import pod_state


def summarize_nodes(attempt_pods: Sequence[Json], *, desired: int) -> Nodes:
    """Summarize how many pods are ready, and where the first 64 pods with a node run, by node rank.

    NB: pods without a node are left out. If all pods of a gang get their nodes at once, the status is then written once.
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
