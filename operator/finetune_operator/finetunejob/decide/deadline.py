"""runPolicy.activeDeadlineSeconds."""

from __future__ import annotations

from datetime import timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.finetunejob.children import classify_children
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import sidecars
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
        name = names.evaluate_name(draft.ftj.name)
        return draft.status.evaluation is not None or _has_completed(
            draft, names.EVALUATE, name, names.EVALUATE_CONTAINER
        )
    name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
    nodes = draft.spec.distributed.nodes
    return draft.holds(ConditionType.TRAINED) or _has_completed(
        draft, names.TRAIN, name, names.TRAINER_CONTAINER, nodes=nodes
    )


def _has_completed(draft: Draft, component: str, name: str, container: str, *, nodes: int = 1) -> bool:
    children = classify_children(draft.observed.jobs, draft.observed.pods, component, name)
    job = children.current_job
    return job is not None and sidecars.has_completed(job, children.pods, container, nodes=nodes)
