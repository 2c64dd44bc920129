"""Requests of CPU and memory for containers whose template names none.

Without requests, a pod is of the class BestEffort: the kernel and the kubelet kill it first when a node lacks memory, the scheduler puts any
number of such pods on a node, and a quota of requests rejects it.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.base import Json
from finetune_operator.template_merge import containers, merge

_KINDS = ("requests", "limits")
_CPU = "100m"
_MEBIBYTES_PER_PROCESS = 256
"""What a Python process takes that has imported torch and transformers (240 MiB), and less than a rank of the built-in loop takes before it has a
model (560 MiB)."""


def build_process_requests(processes: int = 1) -> dict[str, str]:
    """The requests of a container with a number of Python processes."""
    return build_requests(f"{processes * _MEBIBYTES_PER_PROCESS}Mi")


def build_requests(memory: str) -> dict[str, str]:
    """The requests of a container that needs at least this memory."""
    return {"cpu": _CPU, "memory": memory}


def add_default_requests(pod: Json, name: str, requests: Mapping[str, str]) -> Json:
    """The pod, in which a container requests each resource of which its template names neither a request nor a limit.

    NB: a limit without a request is the request too. A template with resources of the whole pod stays as it is, since the requests of its
    containers count against them; so do resources that are no object, which the API server rejects.
    """
    container = next(containers(pod, name), {})
    resources = container.get("resources") or {}
    if "resources" in pod["spec"] or not isinstance(resources, dict):
        return pod
    amounts = [resources.get(kind) or {} for kind in _KINDS]
    missing = {
        resource: amount
        for resource, amount in requests.items()
        if not any(resource in named for named in amounts if isinstance(named, dict))
    }
    if not missing or not all(isinstance(named, dict) for named in amounts):
        return pod
    addition = {"name": name, "resources": {"requests": missing}}
    return dict(merge(pod, {"spec": {"containers": [addition]}}))
