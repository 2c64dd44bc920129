"""runPolicy.activeDeadlineSeconds."""

from __future__ import annotations

from datetime import timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.finetunejob.children import job_condition
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.policy.outcome import Continue, Outcome, Stop


def deadline(draft: Draft) -> Outcome:
    """Fail a job whose preparation, training and evaluation took longer than they may; time spent suspended does not count."""
    limit = draft.spec.run_policy.active_deadline_seconds
    start = draft.status.start_time
    if limit is None or start is None or _is_over(draft):
        return Continue
    end = start + timedelta(seconds=limit + (draft.status.suspended_seconds or 0))
    left = (end - draft.now).total_seconds()
    if left > 0:
        draft.requeue_after(left)
        return Continue
    draft.fail(
        ConditionReason.DEADLINE_EXCEEDED,
        f"the job ran longer than runPolicy.activeDeadlineSeconds = {limit}: raise it in a new FineTuneJob",
    )
    return Stop


def _is_over(draft: Draft) -> bool:
    """Whether the last pods of the job completed, also where no pass has written that into the status yet."""
    if draft.spec.evaluation:
        return draft.status.evaluation is not None or _completed(draft, names.evaluate_name(draft.ftj.name))
    name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
    return draft.holds(ConditionType.TRAINED) or _completed(draft, name)


def _completed(draft: Draft, name: str) -> bool:
    child = draft.observed.jobs.get(name)
    return child is not None and job_condition(child, "Complete") is not None
