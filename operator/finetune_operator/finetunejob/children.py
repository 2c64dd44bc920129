"""The objects that belong to a FineTuneJob, and the states of its batch Jobs and pods.

A child belongs to the FineTuneJob by its controller ownerReference, in the namespace of the FineTuneJob: a pod of a batch Job through the
Job's uid, and any other child, such as the pod of a Spark driver, by the FineTuneJob's uid. Labels only select candidates, since any user
can write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.batch.state import has_ended, is_alive, is_being_deleted, job_condition
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.owners import Owner, find_controller, find_finetunejob, find_owner

# How long a kubelet may take to report that a pod has stopped after its grace period.
_STOP_ALLOWANCE = timedelta(seconds=10)


def is_child(body: Json, ftj: FineTuneJob) -> bool:
    """Whether a FineTuneJob itself, not one of its Jobs, controls an object of its namespace."""
    # NB: not `find_owner`, which looks for a Job if the object is a Pod: a FineTuneJob itself controls the pod of a Spark driver.
    return find_finetunejob(body) == Owner(ftj.namespace, ftj.uid)


def controlling_pod(body: Json) -> str | None:
    """The uid of the Pod that controls an object; None when no Pod does."""
    reference = find_controller(body)
    if reference is None or (reference["apiVersion"], reference["kind"]) != ("v1", "Pod"):
        return None
    return str(reference["uid"])


def recorded_jobs(body: Json) -> set[tuple[str, str]]:
    """The Jobs that a FineTuneJob's status names, as namespace and uid; they may no longer exist."""
    # NB: trainAttempt and trainStartTime, which are among the values too, match no uid.
    uids: Json = (body.get("status") or {}).get("jobs") or {}
    return {Owner(body["metadata"]["namespace"], uid) for uid in uids.values()}


class ComponentChildren(NamedTuple):
    """The children of one component (preparation, training or evaluation), relative to its current Job."""

    current_job: Json | None
    """The current Job; None if it does not exist, or is being deleted and not complete."""
    pods: list[Json]
    """The pods of the current Job, sorted by completion index."""
    stale_jobs: list[Json]
    """Jobs of earlier attempts that still run, and Jobs that are being deleted and are neither complete nor abandoned."""
    stale_pods: list[Json]
    """Pods that have not ended, are not lost, and belong to Jobs other than the current one. These Jobs may no longer exist."""
    ended_jobs: list[Json]
    """Jobs of earlier attempts that are complete or failed."""
    abandoned_jobs: tuple[Json, ...] = ()
    """Jobs that are being deleted, and exist only because some of their pods are lost."""


def classify_children(
    jobs: Mapping[str, Json], pods: Sequence[Json], component: str, name: str, now: datetime
) -> ComponentChildren:
    """Classify a FineTuneJob's children of a component.

    Args:
        jobs: the FineTuneJob's Jobs, by name.
        pods: the pods of these Jobs, and of Jobs that no longer exist.
        name: the name of the current Job, which need not exist.
    """
    component_jobs = [job for job in jobs.values() if _component(job) == component]
    # NB: a Job that is being deleted counts as absent, since it may have failed because of the deletion. A complete Job has a result, so it
    # does not count as absent.
    vanishing_jobs = [
        job for job in component_jobs if is_being_deleted(job) and job_condition(job, "Complete") is None
    ]
    abandoned_jobs = [job for job in vanishing_jobs if is_abandoned(job, pods, now)]
    lasting_jobs = [job for job in component_jobs if job not in vanishing_jobs]
    current = next((job for job in lasting_jobs if job["metadata"]["name"] == name), None)
    job_pods = pods_of_job(pods, current) if current else []
    return ComponentChildren(
        current_job=current,
        pods=job_pods,
        stale_jobs=[
            *(job for job in vanishing_jobs if job not in abandoned_jobs),
            *(job for job in lasting_jobs if job is not current and not has_ended(job)),
        ],
        stale_pods=[
            pod
            for pod in pods
            if _component(pod) == component
            and is_alive(pod)
            and not is_lost(pod, now)
            and pod not in job_pods
        ],
        ended_jobs=[job for job in lasting_jobs if job is not current and has_ended(job)],
        abandoned_jobs=tuple(abandoned_jobs),
    )


def _component(child: Json) -> str | None:
    return (child["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)


def is_on_unready_node(pod: Json) -> bool:
    """Whether the node lifecycle controller has marked a pod because its node is not ready.

    NB: the controller sets Ready to False and changes nothing else (MarkPodsNotReady in pkg/controller/util/node, 1.37): ContainersReady
    stays True, and Ready has no reason. A kubelet that sets Ready to False also sets a reason. The controller does not mark a pod that was
    not ready before, so the result for such a pod is False.
    """
    conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions") or []}
    ready = conditions.get("Ready", {})
    are_containers_ready = conditions.get("ContainersReady", {}).get("status") == "True"
    return ready.get("status") == "False" and not ready.get("reason") and are_containers_ready


def find_loss_time(pod: Json) -> datetime | None:
    """When a pod that is being deleted counts as lost at the latest; None for any other pod.

    NB: deletionTimestamp is the end of the grace period.
    """
    if not is_being_deleted(pod):
        return None
    return datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]) + _STOP_ALLOWANCE


def is_lost(pod: Json, now: datetime) -> bool:
    """Whether a pod that is being deleted cannot be expected to stop.

    The pod is lost if its node is not ready, so that no kubelet stops the pod, or if the pod has not stopped soon after its grace period. A
    pod that nobody deletes is never lost: if its node does not return, Kubernetes evicts the pod when the pod's tolerations end.
    """
    loss_time = find_loss_time(pod)
    return loss_time is not None and is_alive(pod) and (is_on_unready_node(pod) or now >= loss_time)


def is_abandoned(job: Json, pods: Iterable[Json], now: datetime) -> bool:
    """Whether a Job is being deleted and exists only because some of its pods are lost."""
    remaining_pods = [pod for pod in pods_of_job(pods, job) if is_alive(pod)]
    return is_being_deleted(job) and bool(remaining_pods) and all(is_lost(pod, now) for pod in remaining_pods)


def find_deletion_request_time(pod: Json) -> datetime | None:
    """When the deletion of a pod was requested; None if it was not."""
    meta = pod["metadata"]
    if "deletionTimestamp" not in meta:
        return None
    # NB: the timestamp is the end of the grace period.
    grace = timedelta(seconds=meta.get("deletionGracePeriodSeconds") or 0)
    return datetime.fromisoformat(meta["deletionTimestamp"]) - grace


def is_suspended(job: Json) -> bool:
    """Whether a batch Job is to have no pods until something, for example its queue, resumes it."""
    return bool(job["spec"].get("suspend"))


def parse_time(text: str | None) -> datetime | None:
    """Return a time of the API server; None without one."""
    return datetime.fromisoformat(text) if text else None


def find_start_time(job: Json) -> datetime | None:
    """When the pods of a batch Job were last started; None while it is suspended, or before its controller has started them."""
    start = job.get("status", {}).get("startTime")
    # NB: after spec.suspend was unset, the condition Suspended remains until the Job controller starts the pods.
    if not start or is_suspended(job) or job_condition(job, "Suspended"):
        return None
    return datetime.fromisoformat(start)


def was_stopped_by_suspension(pod: Json, job: Json) -> bool:
    """Whether a pod was stopped because its Job was suspended. The Job may have been resumed since, with other pods."""
    request_time = find_deletion_request_time(pod)
    if request_time is None:
        return False
    start_time = find_start_time(job)
    if start_time is None:
        return is_suspended(job) or job_condition(job, "Suspended") is not None
    # `start_time` is the latest start of the Job. A pod of this start is created after it, so its deletion is requested after it too.
    return request_time <= start_time


def pods_of_job(pods: Iterable[Json], job: Json) -> list[Json]:
    """The pods of one child Job, sorted by completion index; without pods that ended before the Job was last resumed.

    They have the Job's uid: pods of an earlier Job with the same name may still be stopping.
    """
    meta = job["metadata"]
    job_pods = [
        pod
        for pod in pods
        if find_owner("Pod", pod) == (meta["namespace"], meta["uid"])
        and not _has_ended_by_earlier_suspension(pod, job)
    ]
    return sorted(job_pods, key=lambda pod: (node_rank(pod) or 0, pod["metadata"]["name"]))


def _has_ended_by_earlier_suspension(pod: Json, job: Json) -> bool:
    """Whether a pod ended because its Job was suspended, and the Job has been resumed since."""
    return not is_suspended(job) and not is_alive(pod) and was_stopped_by_suspension(pod, job)


def node_rank(pod: Json) -> int | None:
    """The node rank of a pod, which is its completion index; None for a pod of a Job that is not Indexed."""
    index = pod["metadata"].get("annotations", {}).get(names.ANNOTATION_INDEX)
    return int(index) if index is not None else None
