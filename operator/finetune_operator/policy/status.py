"""Building a new status, and the time of the next reconcile, for all kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Any, Generic, TypeVar

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.schedule_status import FineTuneScheduleStatus
from finetune_crds.status import FineTuneJobStatus

Status = TypeVar("Status", FineTuneJobStatus, ModelPromotionStatus, FineTuneScheduleStatus)
# The limit in the schema of a condition.
_MAX_MESSAGE_CHARS = 32768


def find_condition(status: Status, kind: ConditionType) -> Condition | None:
    """The condition of a status; None if it is not set."""
    return next((item for item in status.conditions if item.type == kind), None)


def read_condition(body: Json, kind: ConditionType) -> tuple[str | None, str | None]:
    """Return the status and the reason of a condition of a resource in JSON; both are None if it has no such condition."""
    for item in (body.get("status") or {}).get("conditions") or ():
        if item.get("type") == kind:
            return item.get("status"), item.get("reason")
    return None, None


def read_state(state: str) -> bool | None:
    """Whether a condition with this state is True; None for Unknown."""
    return {"True": True, "False": False}.get(state)


def with_condition(
    status: Status,
    kind: ConditionType,
    holds: bool | None,
    reason: str,
    message: str,
    *,
    now: datetime,
    generation: int,
) -> Status:
    """The status with one of its conditions set; the transition time changes only when the condition's status does.

    NB: the API server keeps whole seconds, so a finer time would differ from the time that is read back.

    Args:
        holds: whether the condition is True; None for Unknown.
        generation: the generation of the spec that the condition is about.
    """
    conditions = list(status.conditions)
    before = find_condition(status, kind)
    state = "Unknown" if holds is None else str(holds)
    fields = (state, str(reason), message[:_MAX_MESSAGE_CHARS], generation)
    # NB: copies were a sixth of the CPU time of a pass, and most passes change nothing.
    if before and fields == (before.status, before.reason, before.message, before.observed_generation):
        return status
    after = Condition(
        type=kind.value,
        status=state,  # type: ignore[arg-type]
        reason=str(reason),
        message=message[:_MAX_MESSAGE_CHARS],
        observed_generation=generation,
        last_transition_time=before.last_transition_time
        if before and before.status == state
        else now.replace(microsecond=0),
    )
    if before is None:
        conditions.append(after)
    else:
        conditions[conditions.index(before)] = after
    return status.model_copy(update={"conditions": conditions})


class StatusBuilder(ABC, Generic[Status]):
    """Builds the new status from the current one."""

    status: Status
    now: datetime
    requeue_seconds: float | None

    @property
    @abstractmethod
    def generation(self) -> int:
        """Generation of the spec that the status is about."""

    def update(self, **fields: Any) -> None:
        """Set fields of the status."""
        status = self.status
        # NB: statuses are equal only if the same fields were set, so a field that was never set must be set even to its default.
        changes = {
            name: value
            for name, value in fields.items()
            if name not in status.model_fields_set or getattr(status, name) != value
        }
        if changes:
            self.status = status.model_copy(update=changes)

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition in the new status; None if it is not set."""
        return find_condition(self.status, kind)

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    def set(self, kind: ConditionType, holds: bool | None, reason: ConditionReason, message: str) -> None:
        """Set a condition; its transition time changes only when its status does.

        Args:
            holds: whether the condition is True; None for Unknown.
        """
        self.status = with_condition(
            self.status, kind, holds, reason, message, now=self.now, generation=self.generation
        )

    def requeue_after(self, seconds: float) -> None:
        """Reconcile the resource again after this time at the latest."""
        before = self.requeue_seconds
        self.requeue_seconds = seconds if before is None else min(seconds, before)
