"""Records in the status that an attempt was evicted from its queue: its Job was suspended, and its pods stopped.

Kueue resumes the same Job later, and the attempt goes on with other pods, unless some pods had completed. An eviction does not count as a
restart.
"""

from __future__ import annotations

from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.status import LastFailure
from finetune_operator.batch.state import job_condition
from finetune_operator.finetunejob.children import find_deletion_request_time, find_start_time, parse_time
from finetune_operator.finetunejob.decide import attempt as attempts
from finetune_operator.finetunejob.decide import attempt_history, checkpoint
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import gang, pod_state, queueing
from finetune_operator.owners import find_owner


def record_eviction(draft: Draft, number: int, job: Json) -> bool:
    """Record when the pods of an attempt started and, after Kueue stopped them, that they ended. Return whether the attempt ended with them.

    It ends if some of its pods had completed: the next attempt follows, with all pods. Otherwise, the attempt goes on in the same Job.

    NB: each admission gives the Job another start time. If the Job no longer has the start time in the status, the pods that started then
    were stopped. Pods that start and stop while the operator is down are not recorded.
    """
    if not _record_last_start(draft, number, job) or not _has_completed_pods(job):
        return False
    # Kubernetes never runs a completed index again, so the resumed Job would start only the other pods, which wait for the whole gang.
    draft.remove(job)
    why = f"attempt {number} was stopped after some of its pods had completed"
    attempts.restart(draft, number + 1, counted=False, why=why)
    return True


def record_missed_eviction(draft: Draft, number: int, job: Json) -> None:
    """Record an eviction whose Job was resumed and has ended, or lost a pod with its node, before a pass saw the eviction.

    If the Job is still suspended, its end is the end of the pods that Kueue stopped, and is recorded by itself.
    """
    if find_start_time(job):
        _record_last_start(draft, number, job)


def _record_last_start(draft: Draft, number: int, job: Json) -> bool:
    """Record when the pods last started; if others had started before, record their end. Return whether they had."""
    jobs, start_time = draft.status.jobs, find_start_time(job)
    if jobs is None or not queueing.queue_of(job):
        return False
    if jobs.train_start_time == start_time:
        _explain_last_end(draft, number, job)
        return False
    draft.update(jobs=jobs.model_copy(update={"train_start_time": start_time}))
    if jobs.train_start_time is None:
        # The pods have just been started, so none was stopped.
        return False
    _record_end(draft, number, job, jobs.train_start_time)
    return True


def _record_end(draft: Draft, number: int, job: Json, started_at: datetime) -> None:
    """Record how the pods ended that Kueue stopped. If none of them ran, the attempt has lost nothing, and nothing is recorded."""
    stopped_pods = [pod for pod in draft.observed.pods if _was_stopped_since(pod, job, started_at)]
    nodes_before = draft.ftj.status.nodes
    were_pods_ready = nodes_before is not None and nodes_before.ready > 0
    if not (were_pods_ready or _has_completed_pods(job) or any(map(pod_state.has_run, stopped_pods))):
        return
    reason, message = queueing.explain_suspension(draft, job)
    checkpoint.record_checkpoint(draft, stopped_pods)
    ended = pod_state.first_failure(stopped_pods, gang.CONTAINER, number) or LastFailure(attempt=number)
    step = draft.status.checkpoint.step if draft.status.checkpoint else None
    attempt_history.record_end(
        draft,
        ended.model_copy(update={"reason": reason, "message": message, "checkpoint_step": step}),
        "Preempted",
        end_time=_find_end_time(draft, job),
    )


def _find_end_time(draft: Draft, job: Json) -> datetime:
    """When the stopped pods had ended: by the start of the next pods or, without one, by now."""
    start_time = find_start_time(job)
    if start_time:
        # NB: the same pass may record another end, of the pods that started then.
        return start_time
    # NB: by the clock of the control plane, which may be ahead of the operator's, the Job may have been suspended later than now.
    suspension_time = _find_suspension_time(job)
    return max(draft.now, suspension_time) if suspension_time else draft.now


def _find_suspension_time(job: Json) -> datetime | None:
    """When the condition Suspended of a Job last changed, by the clock of the control plane; None if that is not known."""
    return parse_time((job_condition(job, "Suspended") or {}).get("lastTransitionTime"))


def _has_completed_pods(job: Json) -> bool:
    return bool(job.get("status", {}).get("succeeded"))


def _explain_last_end(draft: Draft, number: int, job: Json) -> None:
    """Add Kueue's explanation to the last entry of an attempt: the pods may have stopped before Kueue was read."""
    ends = draft.status.attempts or []
    if not ends or ends[-1].attempt != number or ends[-1].reason != queueing.JOB_SUSPENDED:
        return
    suspension_time = _find_suspension_time(job)
    if suspension_time and suspension_time > ends[-1].end_time:
        # The entry is about an earlier suspension. No pod ran before this one, so this one has no entry.
        return
    reason, message = queueing.explain_suspension(draft, job)
    if reason != queueing.JOB_SUSPENDED:
        explained = ends[-1].model_copy(update={"reason": reason, "message": message})
        draft.update(attempts=[*ends[:-1], explained])


def _was_stopped_since(pod: Json, job: Json, since: datetime) -> bool:
    request_time = find_deletion_request_time(pod)
    meta = job["metadata"]
    is_of_job = find_owner("Pod", pod) == (meta["namespace"], meta["uid"])
    return is_of_job and request_time is not None and request_time >= since


def has_been_evicted(draft: Draft, number: int) -> bool:
    """Whether Kueue has stopped pods of an attempt that has not ended itself."""
    return any(item.attempt == number for item in draft.status.attempts or [])
