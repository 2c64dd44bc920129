"""`spec.suspend`: stop the pods, keep the checkpoint, and resume from it with a new attempt."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import Nodes
from finetune_operator import names
from finetune_operator.batch.state import describe_pods, has_ended, is_being_deleted
from finetune_operator.finetunejob.children import is_lost
from finetune_operator.finetunejob.decide import checkpoint
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import pod_state
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.policy.result import Continue, Outcome, Stop


def suspend(draft: Draft) -> Outcome:
    """If spec.suspend is set, stop what runs and end the pass."""
    if draft.spec.suspend:
        _stop(draft)
        return Stop
    return Continue


def resume(draft: Draft) -> Outcome:
    """Once spec.suspend is unset, report that the job resumes, even if a later policy makes it wait."""
    if draft.status.suspend_time and not draft.spec.suspend:
        _resume(draft)
    return Continue


def _stop(draft: Draft) -> None:
    """Stop the Jobs and the preparation, and report what has not stopped yet."""
    # A Job that ended by itself is kept: its result is read when the job is resumed.
    draft.stop_children()
    preparation_wait = backends.stop(draft)
    # The pods save a last checkpoint while they stop.
    checkpoint.record_checkpoint(draft, list(draft.observed.pods))
    alive = pod_state.alive(draft.observed.pods)
    lost_pods = [pod for pod in alive if is_lost(pod, draft.now)]
    stopping_pods = [pod for pod in alive if pod not in lost_pods]
    # The pods of a training that is complete are finished, not stopped.
    if draft.status.nodes and not draft.holds(ConditionType.TRAINED):
        draft.update(nodes=Nodes(desired=0, ready=0, summary="0/0"))
    if not draft.status.suspend_time:
        draft.update(suspend_time=draft.now)
    if stopping_pods:
        message = f"waiting for {describe_pods(stopping_pods)} to stop"
    elif preparation_wait:
        message = preparation_wait
    else:
        lost = f"; {pod_state.describe_lost_pod(lost_pods[0])}" if lost_pods else ""
        message = f"no pod runs; set suspend to false to resume{lost}"
    draft.set(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message)
    if draft.condition(ConditionType.PODS_HEALTHY):
        draft.set(
            ConditionType.PODS_HEALTHY,
            None,
            ConditionReason.NO_PODS,
            "no pod should run: the job is suspended",
        )


def _resume(draft: Draft) -> None:
    """Continue with the result of a Job that ended by itself, or else with another attempt."""
    # A resumed job starts at once, without the delay of an earlier preemption, and its idle restarts and idle time count from zero.
    draft.update(suspend_time=None, restart_time=None, idle_restarts=None, no_progress_since=None)
    if draft.condition(ConditionType.PODS_HEALTHY):
        draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "no pod is blocked")
    attempt = None if draft.holds(ConditionType.TRAINED) else draft.status.attempt
    if attempt:
        job = draft.observed.jobs.get(names.train_name(draft.ftj.name, attempt))
        ended_by_itself = job is not None and has_ended(job) and not is_being_deleted(job)
        # `train` reads the result of a Job that ended by itself. The suspension has stopped any other Job: the next attempt starts.
        if not ended_by_itself:
            draft.update(attempt=attempt + 1)
    what = checkpoint.describe_start(draft) if attempt else "goes on"
    draft.set(ConditionType.SUSPENDED, False, ConditionReason.RESUMED, f"the job {what}")
