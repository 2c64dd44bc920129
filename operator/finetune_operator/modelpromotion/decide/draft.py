"""The decision about a promotion while it is being made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import REGRESSED, ModelPromotionStatus, Move, MoveReason, Watch, Withheld
from finetune_crds.serving import Serving
from finetune_operator.modelpromotion.decide.digests import terms_digest
from finetune_operator.modelpromotion.model import Observed, Promotion, PromotionAction, PromotionDecision
from finetune_operator.modelpromotion.version_records import update_record
from finetune_operator.policy.status import StatusBuilder
from finetune_operator.registry.base import MoveAlias
from finetune_operator.settings import Settings

MAX_MESSAGE_CHARS = 4096


def truncate(message: str) -> str:
    """A message, shortened to the length that the status allows."""
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 3]}..."


@dataclass
class Draft(StatusBuilder[ModelPromotionStatus]):
    """One pass over one promotion. `status` starts as the current status and becomes the new one."""

    promotion: Promotion
    observed: Observed
    now: datetime
    settings: Settings
    status: ModelPromotionStatus = field(init=False)
    begun: Move | None = None
    """The move that was in the journal when the pass started; None if the journal had none, or if the alias has moved since."""
    trial: str | None = None
    """The version whose canary comes before its move; None if the endpoint follows the alias."""
    is_number_judged: bool = False
    """Whether the number of spec.onRegression was judged in this pass."""
    actions: list[PromotionAction] = field(default_factory=list)
    finalizer: bool | None = None
    """Whether to set or to remove the finalizer; None to leave it unchanged."""
    requeue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.status = self.promotion.status

    @property
    def generation(self) -> int:
        """Generation of the spec."""
        return self.promotion.generation

    @property
    def spec(self) -> ModelPromotionSpec:
        """The spec. Read it only if the promotion has one, which `accept` checks."""
        if self.promotion.spec is None:
            raise ValueError(f"the spec of {self.promotion.key} was not accepted")
        return self.promotion.spec

    @property
    def serving(self) -> Serving | None:
        """spec.serving; None if the promotion serves no endpoint."""
        return self.promotion.backend.spec if self.promotion.backend else None

    @property
    def holder(self) -> str | None:
        """The version that the alias points at in the registry."""
        return self.observed.alias(self.spec.alias)

    @property
    def lost(self) -> str | None:
        """The version whose deletion removed the alias, until the alias is set again."""
        return self.status.lost

    def has_begun(self, version: str, reason: MoveReason) -> bool:
        """Whether the journal had a move to the version for this reason when the pass started."""
        return self.begun is not None and (self.begun.to_version, self.begun.reason) == (version, reason)

    def remember(self, **entries: Move | Withheld | Watch | list[str] | str | None) -> None:
        """Write entries of the journal; None removes an entry."""
        self.update(journal=self.status.change_journal(**entries))

    def stop(self, reason: ConditionReason, message: str) -> None:
        """Report why the alias is not at its target."""
        self.set(ConditionType.PROMOTED, False, reason, message)

    def withhold(
        self,
        version: str,
        back: str | None,
        message: str,
        *,
        reason: Literal["Withdrawn", "Regressed"] = "Withdrawn",
    ) -> None:
        """Withhold a version that failed. If it has the alias, the policy `withdraw` moves the alias.

        Args:
            back: the version that then gets the alias; None to remove the alias.
            message: why the version is withheld.
            reason: whether it failed at its endpoint (Withdrawn), or after its move (Regressed).
        """
        digest = terms_digest(self.spec)
        failed = Withheld(version=version, reason=reason, digest=digest, back=back, message=truncate(message))
        self.remember(withheld=failed)
        self.record_version(version, bad=REGRESSED if reason == "Regressed" else digest)
        self.requeue_after(0)

    def move_alias(
        self, to: str | None, source: str | None = None, tags: Mapping[str, str] | None = None
    ) -> MoveAlias:
        """Build a move of the alias from its observed version, for the observed model.

        Args:
            to: the version that gets the alias; None to remove the alias.
            source: the alias that the version came from, if it must still point at the version.
            tags: tags to set on the version.
        """
        model = self.observed.model
        return MoveAlias(
            expected=self.holder,
            to=to,
            source=source,
            tags=tags or {},
            created=model.created if model else None,
        )

    def record_version(self, version: str, **fields: Any) -> None:
        """Set fields of the record of a version."""
        self.status = update_record(self.status, version, **fields)

    def watch_from_now(self) -> None:
        """Record the version that the alias points at now as promoted, and watch the alias from now on."""
        self.remember(lost=None)
        self.update(promoted=self.holder, watch_start_time=self.now)
        self.unset(ConditionType.DRIFTED)

    def unset(self, *kinds: ConditionType) -> None:
        """Remove conditions that no longer apply."""
        self.update(conditions=[item for item in self.status.conditions if item.type not in kinds])

    def conclude(self) -> PromotionDecision:
        """The finished decision."""
        return PromotionDecision(
            status=self.status,
            actions=tuple(self.actions),
            finalizer=self.finalizer,
            requeue_seconds=self.requeue_seconds,
        )
