"""runPolicy.activeDeadlineSeconds."""

from __future__ import annotations

from datetime import timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import evaluation_pod, gang
from finetune_operator.finetunejob.pods.step_state import has_completed
from finetune_operator.policy.result import Continue, Outcome, Stop


def enforce_deadline(draft: Draft) -> Outcome:
    """Fail a job whose preparation, training and evaluation took longer than they may; time spent suspended does not count."""
    limit = draft.spec.run_policy.active_deadline_seconds
    start = draft.status.start_time
    if limit is None or start is None or _is_over(draft):
        return Continue
    end = start + timedelta(seconds=limit + (draft.status.suspended_seconds or 0))
    remaining_seconds = (end - draft.now).total_seconds()
    if remaining_seconds > 0:
        draft.requeue_after(remaining_seconds)
        return Continue
    draft.fail(
        ConditionReason.DEADLINE_EXCEEDED,
        f"the job ran longer than runPolicy.activeDeadlineSeconds = {limit}: raise it in a new FineTuneJob",
    )
    return Stop


def _is_over(draft: Draft) -> bool:
    """Whether the last step of the job has completed, also where no pass has written that into the status yet."""
    if draft.spec.evaluation:
        return draft.status.evaluation is not None or has_completed(draft, evaluation_pod.build_step(draft))
    attempt = draft.status.attempt or 1
    return draft.holds(ConditionType.TRAINED) or has_completed(draft, gang.build_step(draft, attempt))
