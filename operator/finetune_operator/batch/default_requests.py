"""Requests of CPU and memory for containers whose template names none.

Without requests, a pod is of the class BestEffort: the kernel and the kubelet kill it first when a node lacks memory, the scheduler puts any
number of such pods on a node, and a quota of requests rejects it.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator.template_merge import containers, merge

_KINDS = ("requests", "limits")
REQUESTS = {"cpu": "100m", "memory": "256Mi"}
"""The memory is what a Python process takes that has imported torch and transformers (240 MiB).

NB: it is the same for all containers, also for those that need more. A LimitRange can give each container a limit, which the operator does not
know, and the API server rejects a pod whose request exceeds its limit.
"""


def add_default_requests(pod: Json, name: str) -> Json:
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
        for resource, amount in REQUESTS.items()
        if not any(resource in by_resource for by_resource in amounts if isinstance(by_resource, dict))
    }
    if not missing or not all(isinstance(by_resource, dict) for by_resource in amounts):
        return pod
    addition = {"name": name, "resources": {"requests": missing}}
    return dict(merge(pod, {"spec": {"containers": [addition]}}))
