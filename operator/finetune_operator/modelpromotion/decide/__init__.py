"""The policies of promotions. Pure: no I/O, no clock of their own; the same input gives the same decision."""

from __future__ import annotations

from datetime import datetime

from finetune_crds.conditions import ConditionType
from finetune_operator.modelpromotion.decide import (
    accept,
    approval,
    approvers,
    drift,
    gate_jobs,
    gates,
    identity,
    job_state,
    move,
    preconditions,
    promote,
    ready,
    registry_copy,
    regression,
    remove,
    rollback,
    serving,
    source,
    trial,
    version_tags,
    windows,
)
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.model import ClaimAlias, Observed, Promotion, PromotionDecision
from finetune_operator.policy.result import run_policies
from finetune_operator.settings import Settings

# The policies run in this order; one that returns Stop skips the policies after it. The rest of `decide` always runs.
POLICIES = (
    accept.require_permission,
    accept.accept,
    preconditions.require_registry,
    identity.check_identity,
    approvers.forget_removed_approvals,
    move.finish_move,
    preconditions.suspend,
    source.resolve_candidate,
    source.require_model,
    gate_jobs.record_results,
    rollback.roll_back,
    drift.handle_drift,
    rollback.hold,
    regression.watch_version,
    promote.withdraw,
    source.require_candidate,
    promote.settle,
    promote.revert,
    gates.check_gates,
    approval.await_approval,
    approval.soak,
    regression.await_recovery,
    windows.await_window,
    trial.await_canary,
    promote.promote,
)


def decide(promotion: Promotion, observed: Observed, now: datetime, settings: Settings) -> PromotionDecision:
    """Decide what to do for a promotion, and its new status."""
    draft = Draft(promotion, observed, now.replace(microsecond=0), settings)
    if promotion.deleting:
        remove.remove(draft)
        job_state.stop_all(draft)
        # A promotion that is deleted before its first pass has no condition to summarize.
        if draft.status.conditions:
            draft.status = ready.summarize_status(promotion, draft.status, draft.now)
        return draft.conclude()
    remove.set_finalizer(draft)
    run_policies(POLICIES, draft)
    # The policies may have given up the move that was in the journal.
    move.record_abandoned(draft)
    regression.interrupt_breach(draft)
    if _can_write(draft):
        version_tags.tag_version(draft)
        _claim(draft)
    _serve(draft)
    _tidy_jobs(draft)
    identity.record_identity(draft)
    draft.status = ready.summarize_status(promotion, draft.status, draft.now)
    return draft.conclude()


def _tidy_jobs(draft: Draft) -> None:
    """Stop the Jobs that are not needed. While the registry does not answer, the needed ones are unknown, and all go on."""
    if draft.promotion.spec is None or not draft.holds(ConditionType.ACCEPTED):
        return
    if draft.spec.suspend:
        job_state.stop_all(draft)
    elif draft.holds(ConditionType.REGISTRY_READY):
        gate_jobs.tidy(draft)
        registry_copy.tidy(draft)


def _serve(draft: Draft) -> None:
    """Make the endpoint follow the alias, or a candidate on trial. While the alias moves or has drifted, only roll back a failed rollout."""
    promotion = draft.promotion
    if promotion.spec is None:
        # Keep the status of the endpoint: it applies again once the spec can be read.
        return
    if promotion.backend is None:
        draft.unset(ConditionType.SERVED)
        draft.update(serving=None)
    elif draft.observed.model is None and draft.status.registry:
        # The model was found before: leave the endpoint alone, since the model may come back, or the spec may point to another registry
        # for a time.
        return
    elif not _can_write(draft):
        return
    elif draft.status.move is None and draft.status.promoted == draft.holder:
        # No move is in progress, and the alias points where it should.
        serving.serve(draft)
    else:
        serving.hold(draft)


def _claim(draft: Draft) -> None:
    """Take the alias for this installation, or renew that it has the alias."""
    state = draft.observed.ownership.state
    if state in ("Unclaimed", "Due"):
        draft.actions.append(ClaimAlias(is_new=state == "Unclaimed"))


def _can_write(draft: Draft) -> bool:
    """Whether the promotion may write to the registry and the endpoint in this pass."""
    return (
        draft.holds(ConditionType.ACCEPTED)
        and draft.holds(ConditionType.REGISTRY_READY)
        and not draft.holds(ConditionType.SUSPENDED)
    )
