"""runPolicy.activeDeadlineSeconds, and the waiting time that it excludes."""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.batch.state import has_ended
from finetune_operator.finetunejob.children import is_abandoned, is_suspended, pods_of_job
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import evaluation_pod, gang, pod_state
from finetune_operator.finetunejob.pods.step_state import has_completed
from finetune_operator.policy.result import Continue, Outcome, Stop


def record_waiting(draft: Draft) -> Outcome:
    """Record when a started job began to wait, and the total time of its earlier waits."""
    # NB: the pass that created the first Job may not have written its status.
    has_started = draft.status.start_time is not None or bool(draft.observed.jobs)
    if has_started:
        record_wait(draft, is_waiting=_is_waiting(draft))
    return Continue


def record_wait(draft: Draft, *, is_waiting: bool) -> None:
    """Record whether a started job waits now; when its wait ends, add it to the earlier waits."""
    since = draft.status.waiting_since
    if is_waiting:
        if since is None:
            draft.update(waiting_since=draft.now)
    elif since is not None:
        waited = _find_end(draft, since) - since
        seconds = (draft.status.waiting_seconds or 0) + int(waited.total_seconds())
        idle_since = draft.status.no_progress_since
        draft.update(
            waiting_since=None,
            waiting_seconds=seconds,
            # The time without progress excludes waits, so its start moves by the wait.
            no_progress_since=idle_since + waited if idle_since else None,
        )


def enforce_deadline(draft: Draft) -> Outcome:
    """Fail a job whose preparation, training and evaluation took longer than the deadline; waits are excluded."""
    limit = draft.spec.run_policy.active_deadline_seconds
    start = draft.status.start_time
    if limit is None or start is None or draft.status.waiting_since or _is_over(draft):
        return Continue
    end = start + timedelta(seconds=limit + (draft.status.waiting_seconds or 0))
    remaining_seconds = (end - draft.now).total_seconds()
    if remaining_seconds > 0:
        draft.requeue_after(remaining_seconds)
        return Continue
    draft.fail(
        ConditionReason.DEADLINE_EXCEEDED,
        f"the job ran longer than runPolicy.activeDeadlineSeconds = {limit}: create a FineTuneJob with another name and a higher limit",
    )
    return Stop


def _is_waiting(draft: Draft) -> bool:
    """Whether the job is suspended, or all its unfinished Jobs wait in a queue or for nodes.

    NB: without an unfinished Job, the job does not wait: it runs in Databricks or in a SparkApplication, or is between two attempts.
    """
    if draft.spec.suspend:
        return True
    unfinished_jobs = [
        job
        for job in draft.observed.jobs.values()
        if not has_ended(job) and not is_abandoned(job, draft.observed.pods, draft.now)
    ]
    return bool(unfinished_jobs) and not any(_is_at_work(draft, job) for job in unfinished_jobs)


def _is_at_work(draft: Draft, job: Json) -> bool:
    """Whether a pod of a Job has a node. Pods that have ended are included, unless the Job is back in its queue."""
    pods = pods_of_job(draft.observed.pods, job)
    if is_suspended(job):
        pods = pod_state.alive(pods)
    return any(_is_on_node(pod) for pod in pods)


def _is_on_node(pod: Json) -> bool:
    return bool(pod.get("spec", {}).get("nodeName")) or pod.get("status", {}).get("phase") != "Pending"


def _find_end(draft: Draft, since: datetime) -> datetime:
    """Return when a wait ended: at the first start of a pod after `since`; without such a start, now.

    The pod may have started long before this pass, for example while the operator was down.
    """
    times = [pod.get("status", {}).get("startTime") for pod in draft.observed.pods]
    starts = [datetime.fromisoformat(time) for time in times if time]
    return min([*(start for start in starts if start >= since), draft.now])


def _is_over(draft: Draft) -> bool:
    """Whether the last pods of the job have completed, even if the status does not record it yet."""
    if draft.spec.evaluation:
        return draft.status.evaluation is not None or has_completed(draft, evaluation_pod.build_step(draft))
    attempt = draft.status.attempt or 1
    return draft.holds(ConditionType.TRAINED) or has_completed(draft, gang.build_step(draft, attempt))
