"""Containers that a webhook adds to a pod, and that keep running after its main container ends.

Such a container keeps the pod and its Job running, so the operator uses the result of the main container and does not wait for the Job. A
pod template is not allowed to add such a container: `mistakes` refuses it, and names the form of a sidecar that ends by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_operator.batch.state import has_ended, job_condition
from finetune_operator.finetunejob.children import classify_children, is_suspended
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import pod_state

# How long a failure waits for the other ranks: they end within seconds of each other, and the first to end is not always the cause.
_PEERS_TIMEOUT = timedelta(seconds=30)


def find_outlived(job_pods: Sequence[Json], container: str) -> list[pod_state.Exit]:
    """How main containers ended, the earliest first, whose pods do not show it in their phase, because another container still runs or failed."""
    return [ended for ended in pod_state.exits(job_pods, container) if ended.is_outlived]


def has_completed(job: Json, job_pods: Sequence[Json], container: str, *, nodes: int = 1) -> bool:
    """Whether a Job is complete, or its main containers on all nodes have succeeded and another container or a suspension kept it open."""
    return job_condition(job, "Complete") is not None or _has_succeeded(job, job_pods, container, nodes=nodes)


def _has_succeeded(job: Json, job_pods: Sequence[Json], container: str, *, nodes: int) -> bool:
    """Whether the main containers on all nodes have succeeded, although the Job is not complete."""
    succeeded = [ended for ended in pod_state.exits(job_pods, container) if ended.code == 0]
    have_all_succeeded = len({ended.node_rank for ended in succeeded}) == nodes
    # NB: a Job does not count pods that its suspension stopped, so the Job is never complete if such pods succeed while they stop.
    return have_all_succeeded and (is_suspended(job) or any(ended.is_outlived for ended in succeeded))


def find_failure(job: Json, job_pods: Sequence[Json], container: str, now: datetime) -> Json | None:
    """Return the condition Failed of a Job; None if it has not failed.

    The condition is empty if a main container has failed while another container keeps the Job running. NB: call `has_completed`
    first: a Job whose main containers have succeeded still fails if another container fails.
    """
    failed = job_condition(job, "Failed")
    if failed is None and _has_failed(job_pods, container, now):
        return {}
    return failed


def _has_failed(job_pods: Sequence[Json], container: str, now: datetime) -> bool:
    """Whether a main container has failed, although the phase of its pod does not show it, and the other ranks have had time to end."""
    failed = [ended for ended in find_outlived(job_pods, container) if ended.code]
    if not failed:
        return False
    have_all_ended = len(pod_state.exits(job_pods, container)) == len(job_pods)
    # NB: the end of a container whose state is lost (ContainerStatusUnknown) has no time, so no wait can begin at it.
    failure_times = [ended.finished_at for ended in failed if ended.finished_at]
    if have_all_ended or not failure_times:
        return True
    return now - datetime.fromisoformat(failure_times[0]) >= _PEERS_TIMEOUT


def release(draft: Draft, component: str, name: str, container: str) -> None:
    """Delete the Job of a completed step, if another container keeps it running, or if it was suspended and would run the step again.

    NB: call this in a pass after the one that wrote the result into the status. A crash after the deletion would otherwise lose the result.
    """
    children = classify_children(draft.observed.jobs, draft.observed.pods, component, name, draft.now)
    job = children.current_job
    if job and not has_ended(job) and (is_suspended(job) or find_outlived(children.pods, container)):
        draft.remove(job)


def explain_no_retry(job_pods: Sequence[Json], container: str) -> str:
    """Explain why a Job does not retry, as the end of a sentence about its failure; empty if no other container prevents a retry."""
    pod_names = {ended.pod for ended in find_outlived(job_pods, container)}
    outlived_pods = [pod for pod in job_pods if pod["metadata"]["name"] in pod_names]
    # The pods are alike, so each container counts once, in its state in the last pod.
    states = {
        item["name"]: item.get("state", {})
        for pod in outlived_pods
        for item in pod["status"].get("containerStatuses") or []
    }
    other_containers = ", ".join(name for name, state in states.items() if "terminated" not in state)
    if not other_containers:
        return ""
    return (
        f"; the Job does not retry, because {other_containers} still runs in the pod: inject this container as a sidecar (an "
        "init container with restartPolicy: Always), or exclude the pods of the job from injection"
    )
