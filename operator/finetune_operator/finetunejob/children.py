"""The objects that belong to a FineTuneJob, and the states of its batch Jobs and pods.

A child belongs to the job by its controller ownerReference, in the job's namespace: a pod through its Job's uid, any
other child by the FineTuneJob's uid. Labels only select candidates, since any user can write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from finetune_crds.base import GROUP, Json
from finetune_operator import names
from finetune_operator.finetunejob.model import FineTuneJob

_INDEX = "batch.kubernetes.io/job-completion-index"


class Owner(NamedTuple):
    """The controller of an object: a Job controls its pods, and a FineTuneJob its other children."""

    namespace: str
    uid: str


def find_owner(kind: str, body: Json) -> Owner | None:
    """The Job that controls a pod, or the FineTuneJob that controls another child; None for an object without such a controller."""
    controller_kind = ("batch", "Job") if kind == "Pod" else (GROUP, "FineTuneJob")
    reference = _controller(body)
    if (
        reference is None
        or (str(reference["apiVersion"]).split("/")[0], reference["kind"]) != controller_kind
    ):
        return None
    # NB: an owner is in the namespace of its dependent; Kubernetes treats any other owner as absent.
    return Owner(body["metadata"]["namespace"], reference["uid"])


def is_child(body: Json, ftj: FineTuneJob) -> bool:
    """Whether a FineTuneJob controls a Job, Service or ConfigMap of its namespace."""
    return find_owner("Job", body) == Owner(ftj.namespace, ftj.uid)


def controlling_pod(body: Json) -> str | None:
    """The uid of the Pod that controls an object; None when no Pod does."""
    reference = _controller(body)
    is_pod = reference is not None and (reference["apiVersion"], reference["kind"]) == ("v1", "Pod")
    return str(reference["uid"]) if reference and is_pod else None


def recorded_jobs(body: Json) -> set[tuple[str, str]]:
    """The Jobs that a FineTuneJob's status names, as namespace and uid; they may no longer exist."""
    uids: Json = (body.get("status") or {}).get("jobs") or {}
    return {Owner(body["metadata"]["namespace"], uid) for uid in uids.values()}


def _controller(body: Json) -> Json | None:
    """The ownerReference of an object's controller; None without one. There is at most one."""
    references = body["metadata"].get("ownerReferences") or []
    return next((dict(item) for item in references if item.get("controller") is True), None)


class ComponentChildren(NamedTuple):
    """The children of one component (preparation, training or evaluation), relative to its current Job."""

    current_job: Json | None
    """The current Job; None if it does not exist, or is being deleted and not complete."""
    pods: list[Json]
    """Its pods, by completion index."""
    stale_jobs: list[Json]
    """Jobs of earlier attempts that still run, and Jobs that are being deleted."""
    stale_pods: list[Json]
    """Pods that have not ended and belong to other Jobs, which may no longer exist."""
    ended_jobs: list[Json]
    """Jobs of earlier attempts that are complete or failed."""


def classify_children(
    jobs: Mapping[str, Json], pods: Sequence[Json], component: str, name: str
) -> ComponentChildren:
    """Classify a FineTuneJob's children of a component.

    Args:
        jobs: its Jobs, by name.
        pods: the pods of these Jobs, and of Jobs that no longer exist.
        name: the name of the current Job, which need not exist.
    """
    component_jobs = [job for job in jobs.values() if _component(job) == component]
    # NB: a Job may fail because it is being deleted; a complete Job keeps its result.
    deleted_jobs = [
        job for job in component_jobs if is_being_deleted(job) and job_condition(job, "Complete") is None
    ]
    lasting_jobs = [job for job in component_jobs if job not in deleted_jobs]
    current = next((job for job in lasting_jobs if job["metadata"]["name"] == name), None)
    job_pods = pods_of_job(pods, current) if current else []
    return ComponentChildren(
        current_job=current,
        pods=job_pods,
        stale_jobs=[
            *deleted_jobs,
            *(job for job in lasting_jobs if job is not current and not has_ended(job)),
        ],
        stale_pods=[
            pod for pod in pods if _component(pod) == component and is_alive(pod) and pod not in job_pods
        ],
        ended_jobs=[job for job in lasting_jobs if job is not current and has_ended(job)],
    )


def _component(child: Json) -> str | None:
    return (child["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)


def is_being_deleted(child: Json) -> bool:
    """Whether an object is being deleted."""
    return "deletionTimestamp" in child["metadata"]


def is_alive(pod: Json) -> bool:
    """Whether a pod has not ended, even if it is being deleted."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def job_condition(child: Json, kind: str) -> Json | None:
    """The condition of this type if a batch Job has it with status True; otherwise None."""
    for item in child.get("status", {}).get("conditions") or []:
        if item.get("type") == kind and item.get("status") == "True":
            return dict(item)
    return None


def has_ended(child: Json) -> bool:
    """Whether a batch Job is complete or failed."""
    return job_condition(child, "Complete") is not None or job_condition(child, "Failed") is not None


def pods_of_job(pods: Iterable[Json], child: Json) -> list[Json]:
    """The pods of one child Job, by completion index.

    The Job's uid identifies them: pods of an earlier Job of the same name may still be stopping.
    """
    meta = child["metadata"]
    job_pods = [pod for pod in pods if find_owner("Pod", pod) == (meta["namespace"], meta["uid"])]
    return sorted(job_pods, key=lambda pod: (node_rank(pod) or 0, pod["metadata"]["name"]))


def node_rank(pod: Json) -> int | None:
    """The node rank of a pod, which is its completion index; None for a pod of a Job that is not Indexed."""
    index = pod["metadata"].get("annotations", {}).get(_INDEX)
    return int(index) if index is not None else None
