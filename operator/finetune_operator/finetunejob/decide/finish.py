"""The end of a job, and the cleanup after it. Terminal states are final."""

from __future__ import annotations

from datetime import timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.batch.state import has_ended
from finetune_operator.finetunejob.decision import FinishRun
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import find_run_status, has_open_run
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.policy.result import Continue, Outcome, Stop


def is_finished(draft: Draft) -> bool:
    """Whether the job has succeeded or failed, which is final."""
    return draft.holds(ConditionType.SUCCEEDED) or draft.holds(ConditionType.FAILED)


def succeed(draft: Draft) -> Outcome:
    """Mark the job as succeeded: all its steps are complete."""
    draft.set(
        ConditionType.SUCCEEDED, True, ConditionReason.SUCCEEDED, "the job completed every step of its spec"
    )
    draft.update(completion_time=draft.now)
    return Continue


def end_if_unchanged(draft: Draft) -> Outcome:
    """End the job after its preparation if the data is that of the last job of its schedule: FineTuneSchedule.spec.onlyIfDataChanged."""
    data, trained_data = draft.status.data, draft.ftj.trained_data
    has_begun_training = draft.status.attempt is not None
    if trained_data is None or data is None or data.digest != trained_data or has_begun_training:
        return Continue
    message = f"nothing was trained: the data has digest {trained_data}, as that of the last job of the schedule that succeeded"
    draft.set(ConditionType.SUCCEEDED, True, ConditionReason.DATA_UNCHANGED, message)
    draft.update(completion_time=draft.now)
    return Stop


def clean_up(draft: Draft) -> None:
    """Stop running children, close the MLflow run, and delete the children when their TTL expires.

    A finished job creates nothing.
    """
    _stop_children(draft)
    close_run(draft)
    # NB: a failed action holds back the actions after it, and a workspace may never respond again: close the MLflow run first.
    backends.stop(draft)
    delete_children(draft)


def _stop_children(draft: Draft) -> None:
    """Delete the Jobs that still run.

    NB: a Job whose pods have succeeded may still run, because of another container or of Kueue. It is deleted only after the status says that
    the job succeeded: if the status cannot be written, the next pass needs the result of these pods.
    """
    # `draft.ftj` has the status that an earlier pass wrote, and `draft.holds` reads the status of this pass.
    if draft.ftj.is_finished or not draft.holds(ConditionType.SUCCEEDED):
        draft.stop_children()
    elif not all(has_ended(job) for job in draft.observed.jobs.values()):
        draft.requeue_after(0)


def close_run(draft: Draft) -> None:
    """Close the MLflow run. Record its end only once MLflow has been read and shows that the run is closed or no longer exists."""
    run_id = draft.status.run_id
    if run_id is None or not has_open_run(draft.status):
        return
    end_status = find_run_status(draft.status)
    mlflow = draft.observed.mlflow
    run = mlflow.writable_run if mlflow else None
    if run and run.status == end_status:
        draft.set(
            ConditionType.TRACKED,
            True,
            ConditionReason.RUN_FINISHED,
            f"MLflow run {run_id} is {end_status}",
        )
        return
    if run:
        draft.actions.append(FinishRun(run_id, end_status))
    elif mlflow and not mlflow.problem:
        draft.set(
            ConditionType.TRACKED,
            False,
            ConditionReason.RUN_FINISHED,
            f"MLflow run {run_id} no longer exists",
        )


def delete_children(draft: Draft) -> None:
    """Delete all children when their TTL has expired: Jobs and FineTuneJobs here, the other kinds by `draft.deletes_all`."""
    ttl = draft.ftj.spec.run_policy.ttl_seconds_after_finished if draft.ftj.spec else None
    ended = draft.status.completion_time
    if ttl is None or ended is None:
        return
    remaining_seconds = (ended + timedelta(seconds=ttl) - draft.now).total_seconds()
    if remaining_seconds > 0:
        draft.requeue_after(remaining_seconds)
        return
    for child in draft.observed.jobs.values():
        draft.remove(child)
    for child in draft.observed.children.values():
        draft.remove(child, "FineTuneJob")
    before = draft.condition(ConditionType.PODS_HEALTHY)
    message = (
        f"the child resources were deleted {ttl} s after the job finished: runPolicy.ttlSecondsAfterFinished"
    )
    draft.set(ConditionType.PODS_HEALTHY, None, ConditionReason.NO_PODS, message)
    # Delete them in the pass that sets the condition. The status is written after the deletions, so an interrupted pass is repeated.
    draft.deletes_all = draft.condition(ConditionType.PODS_HEALTHY) != before
