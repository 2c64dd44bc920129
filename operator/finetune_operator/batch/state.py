"""The states of batch Jobs and of their pods, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.base import Json


def is_being_deleted(child: Json) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in child["metadata"]


def is_alive(pod: Json) -> bool:
    """Whether a pod has not ended, even if it is being deleted."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def job_condition(job: Json, kind: str) -> Json | None:
    """The condition of this type if a batch Job has it with status True; otherwise None."""
    for item in job.get("status", {}).get("conditions") or []:
        if item.get("type") == kind and item.get("status") == "True":
            return dict(item)
    return None


def has_ended(job: Json) -> bool:
    """Whether a batch Job is complete or failed."""
    return job_condition(job, "Complete") is not None or job_condition(job, "Failed") is not None


def find_node(pod: Json) -> str | None:
    """The node of a pod; None while it has none."""
    return pod.get("spec", {}).get("nodeName") or None


def describe_pods(pods: Sequence[Json]) -> str:
    """The first pod with its node, and the number of the others."""
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"{describe_pod(pods[0]['metadata']['name'], find_node(pods[0]))}{more}"


def describe_pod(name: str, node: str | None) -> str:
    """A pod with its node, if it has one."""
    return f"pod {name} on node {node}" if node else f"pod {name}"
