"""One pass over one promotion: observe, decide, apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.controller.leases import LeaseBusy
from finetune_operator.controller.reconciler import BUSY_SECONDS, Reconciler, utc_now
from finetune_operator.errors import ExternalError
from finetune_operator.modelpromotion.apply import ModelPromotionApplier, StaleError
from finetune_operator.modelpromotion.decide import decide
from finetune_operator.modelpromotion.decide.failed_action import record_failed_action
from finetune_operator.modelpromotion.decide.ready import summarize_status
from finetune_operator.modelpromotion.decide.version_tags import record_tags
from finetune_operator.modelpromotion.model import (
    ClaimAlias,
    Observed,
    Promotion,
    PromotionAction,
    PromotionDecision,
    ReleaseJob,
    StopJob,
    sets_only_tags,
)
from finetune_operator.modelpromotion.observe import ModelPromotionObserver, read_promotion
from finetune_operator.policy.status import with_condition
from finetune_operator.registry.writer import AliasMoved, ModelReplaced
from finetune_operator.serving.model import LogRequests, StopLogging
from finetune_operator.settings import Settings
from finetune_operator.tenancy.permissions import Permissions

# Actions whose effect no pass has to see at once.
_LATE_EFFECTS = (ClaimAlias, LogRequests, StopLogging, StopJob, ReleaseJob)


@dataclass
class ModelPromotionReconciler(Reconciler):
    """Handles keys of ModelPromotions."""

    kind: ClassVar[str] = "ModelPromotion"

    observer: ModelPromotionObserver
    applier: ModelPromotionApplier
    settings: Settings
    now: Callable[[], datetime] = utc_now
    permissions: Permissions | None = None
    """What the tenants may use; None: everything."""

    async def reconcile(self, body: Json) -> float | None:
        """One pass: observe, decide, and carry out the decision."""
        promotion = read_promotion(body)
        if promotion.deleting and not promotion.finalizers:
            return None
        refusal = (
            self.permissions.refuse_promotion(promotion.namespace, promotion.spec)
            if self.permissions
            else None
        )
        # NB: nothing is read for a promotion that is not permitted, with whatever credentials.
        observed = Observed(refusal=refusal) if refusal else await self.observer.observe(promotion)
        if self.permissions and promotion.spec:
            needed_approvals = self.permissions.count_approvals(promotion.namespace, promotion.spec)
            observed = dataclasses.replace(observed, needed_approvals=needed_approvals)
        now = self.now()
        decision = decide(promotion, observed, now, self.settings)
        try:
            effective_actions = await self._carry_out(promotion, decision, now)
        except (LeaseBusy, AliasMoved, ModelReplaced, StaleError):
            # Not a failure: something changed, and the next reconcile reads it.
            return BUSY_SECONDS
        except ExternalError as error:
            if error.problem.reason != ConditionReason.ENDPOINT_BUSY:
                raise
            # Another client is changing the endpoint, which takes minutes.
            return self.settings.poll_seconds
        # Reconcile at once to read back what was written, except for a change of logging, which is checked at the next poll, and for Jobs
        # that end, which a watch reports.
        changed = any(not isinstance(action, _LATE_EFFECTS) for action in effective_actions)
        return 0.0 if changed else decision.requeue_seconds

    def find_longest_wait(self, body: Json) -> float:
        """Return the resync interval: no watch reports that an alias was moved in the registry, or that an endpoint was changed."""
        del body
        return self.settings.resync_seconds

    async def report_internal_error(self, body: Json, message: str) -> None:
        """Report in the status that the promotion cannot be reconciled."""
        promotion, now = read_promotion(body), self.now()
        kind, reason = ConditionType.ACCEPTED, ConditionReason.INTERNAL_ERROR
        status = with_condition(
            promotion.status, kind, None, reason, message, now=now, generation=promotion.generation
        )
        decision = PromotionDecision(status=summarize_status(promotion, status, now))
        await self.applier.write_status(promotion, decision, now)

    async def _carry_out(
        self, promotion: Promotion, decision: PromotionDecision, now: datetime
    ) -> tuple[PromotionAction, ...]:
        """Apply a decision, and then its finalizer. If an action fails, the finalizer stays: only write the status again, with the error.

        If only tags of a version could not be set, the status has the error, and a later pass tries again: the alias is in place.

        Returns:
            The actions that took effect.

        Raises:
            KubeError: the API server refused something, or could not be reached.
            LeaseBusy: another replica writes to the model.
            StaleError: the promotion changed meanwhile.
            AliasMoved: another client moved the alias meanwhile.
            ModelReplaced: the registry has another model of this name.
            ExternalError: the registry or the endpoint could not be written to; the status has the error.
        """
        applied = await self.applier.apply(promotion, decision, now)
        failed_actions = [action for action, _ in applied.failed_actions]
        effective_actions = tuple(action for action in decision.actions if action not in failed_actions)
        for action, error in applied.failed_actions:
            decision = record_failed_action(promotion, decision, action, error.problem, now=now)
        has_set_tags = any(map(sets_only_tags, effective_actions))
        if has_set_tags:
            decision = record_tags(decision)
        if failed_actions or has_set_tags:
            await self.applier.write_status(promotion, decision, now, onto=applied.body)
        for action, error in applied.failed_actions:
            if not sets_only_tags(action):
                raise error
        if decision.finalizer is not None:
            await self.applier.set_finalizer(promotion, is_needed=decision.finalizer)
        return effective_actions
