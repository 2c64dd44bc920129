"""How long a pod waits for a node that is not ready, before Kubernetes evicts it."""

from __future__ import annotations

from typing import Any

from finetune_crds.base import Json

# The node lifecycle controller puts one of these taints on a node that is not ready.
_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_EVICTS = "NoExecute"


def limit_wait_for_node(pod: Json, seconds: int) -> Json:
    """The pod with a toleration for each taint of a node that is not ready, unless the pod tolerates that taint already.

    NB: without these tolerations, the admission plugin DefaultTolerationSeconds adds tolerations of 300 s.
    """
    existing: Any = pod["spec"].get("tolerations", [])
    if not isinstance(existing, list):
        # NB: the API server has not validated the template yet, and will reject it.
        return pod
    added = [
        {"key": taint, "operator": "Exists", "effect": _EVICTS, "tolerationSeconds": seconds}
        for taint in _TAINTS
        if not any(_tolerates(item, taint) for item in existing)
    ]
    return {**pod, "spec": {**pod["spec"], "tolerations": [*existing, *added]}} if added else pod


def _tolerates(toleration: Any, taint: str) -> bool:
    """Whether a toleration applies to a taint that evicts. Without a key, it applies to all keys; without an effect, to all effects."""
    if not isinstance(toleration, dict):
        return False
    return toleration.get("key") in (None, "", taint) and toleration.get("effect") in (None, "", _EVICTS)
