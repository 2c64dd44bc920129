"""After an attempt that could not start because a server was away, one pod tries first, and the others follow it.

A gang that waits for a server of code or packages would take all its nodes at each attempt, and release them again. The Job of such
an attempt begins with a parallelism of 1; when the command of its first pod runs, the Job gets all its pods.
"""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft


def begins_with_one_pod(draft: Draft, attempt: int) -> bool:
    """Whether the previous attempt ended because a server was away, and this one begins with one pod.

    NB: not in a queue: Kueue admits a Job again when its parallelism changes.
    """
    failure, trainer = draft.status.last_failure, draft.spec.trainer
    needs_servers = bool(trainer.dependencies) or (trainer.code is not None and trainer.code.git is not None)
    return (
        needs_servers
        and draft.spec.distributed.nodes > 1
        and not draft.spec.run_policy.queue_name
        and failure is not None
        and failure.attempt == attempt - 1
        and failure.exit_code == contract.EXIT_UNAVAILABLE
    )


def is_probing(job: Json) -> bool:
    """Whether the Job of an attempt has only its first pod so far."""
    return bool(job["spec"]["parallelism"] < job["spec"]["completions"])


def complete_gang(draft: Draft, job: Json, pods: list[Json]) -> None:
    """Give the Job of an attempt all its pods when the command of the first one runs."""
    if is_probing(job) and any(map(_has_started, pods)):
        draft.scale(job, job["spec"]["completions"])


def _has_started(pod: Json) -> bool:
    """Whether the command of a training pod has started, so that its init containers have succeeded."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(item["name"] == names.TRAINER_CONTAINER and "running" in item["state"] for item in statuses)
