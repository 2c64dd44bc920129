"""Begins an attempt with one pod, if a server did not answer the previous attempt, or refused the login; the other pods follow.

A gang that waits for a server of code or packages would take all its nodes at each attempt, and release them again. The Job of such
an attempt begins with a parallelism of 1; when the command of its first pod runs, the Job gets all its pods.
"""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.batch.blockage import Blockage
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import own_code
from finetune_operator.template_merge import merge


def begins_with_one_pod(draft: Draft, attempt: int) -> bool:
    """Whether an attempt begins with one pod, because the previous attempt ended with EXIT_UNAVAILABLE.

    NB: never in a queue, since Kueue would admit the Job a second time when its parallelism changes; and never with another scheduler,
    which may place all pods of a gang or none.
    """
    failure = draft.status.last_failure
    pod_spec = (draft.spec.pods.train.template or {}).get("spec") or {}
    needs_server = bool(own_code.list_steps(draft.spec.trainer))
    server_was_unavailable = (
        failure is not None
        and failure.attempt == attempt - 1
        and failure.exit_code == contract.EXIT_UNAVAILABLE
    )
    has_several_pods = draft.spec.distributed.nodes > 1
    needs_all_pods_at_once = bool(draft.spec.run_policy.queue_name) or "schedulerName" in pod_spec
    return needs_server and server_was_unavailable and has_several_pods and not needs_all_pods_at_once


def begin_with_one_pod(job: Json) -> Json:
    """The Job of an attempt, with one pod for now."""
    return dict(
        merge(
            job, {"metadata": {"annotations": {names.ANNOTATION_ONE_POD: "true"}}, "spec": {"parallelism": 1}}
        )
    )


def has_begun_with_one_pod(job: Json) -> bool:
    """Whether the Job of an attempt began with one pod.

    The time limit of the rendezvous starts with the first pod, and may end before the others have a node and their packages. So the
    failure of such an attempt does not count as a restart. The next attempt begins with all pods, unless a server is unavailable again.
    """
    return names.ANNOTATION_ONE_POD in (job["metadata"].get("annotations") or {})


def is_probing(job: Json) -> bool:
    """Whether the Job of an attempt has only its first pod so far."""
    return bool(job["spec"]["parallelism"] < job["spec"]["completions"])


def complete_gang(draft: Draft, job: Json, pods: list[Json], blockage: Blockage | None) -> None:
    """Give the Job of an attempt all its pods when the command of its first pod runs, or when the scheduler finds no node for this pod."""
    is_unschedulable = blockage is not None and blockage.reason == ConditionReason.UNSCHEDULABLE
    if is_probing(job) and (is_unschedulable or any(map(_has_started, pods))):
        draft.scale(job, job["spec"]["completions"])


def _has_started(pod: Json) -> bool:
    """Whether the command of a training pod has started, so that its init containers have succeeded."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(item["name"] == names.TRAINER_CONTAINER and "running" in item["state"] for item in statuses)
