"""The decision while it is being made. Policies read the job and what was observed, and write here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from finetune_crds.conditions import Condition, Reason, Type
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.children import job_ended
from finetune_operator.model import Action, Decision, Deletion, Job, Json, Observed
from finetune_operator.settings import Settings

# What the schema of a condition allows.
_MAX_MESSAGE = 32768


def with_condition(
    conditions: Sequence[Condition],
    kind: Type,
    holds: bool | None,
    reason: Reason,
    message: str,
    *,
    now: datetime,
    generation: int,
) -> list[Condition]:
    """The conditions with one of them set; its transition time moves only when its status does."""
    status = "Unknown" if holds is None else str(holds)
    before = next((item for item in conditions if item.type == kind), None)
    since = before.last_transition_time if before and before.status == status else now
    after = Condition(
        type=kind.value,
        status=status,  # type: ignore[arg-type]
        reason=reason.value,
        message=message[:_MAX_MESSAGE],
        observed_generation=generation,
        last_transition_time=since,
    )
    others = [item for item in conditions if item.type != kind]
    position = list(conditions).index(before) if before else len(others)
    return [*others[:position], after, *others[position:]]


@dataclass
class Draft:
    """One pass over one job. `status` starts as it is and becomes what it is to be."""

    job: Job
    observed: Observed
    now: datetime
    settings: Settings
    status: FineTuneJobStatus = field(init=False)
    apply: list[Json] = field(default_factory=list)
    delete: list[Deletion] = field(default_factory=list)
    sweep: bool = False
    actions: list[Action] = field(default_factory=list)
    requeue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.status = self.job.status

    @property
    def spec(self) -> FineTuneJobSpec:
        """The spec; only read after `accept` has let the job through."""
        if self.job.spec is None:
            raise ValueError(f"the spec of {self.job.key} was not accepted")
        return self.job.spec

    def update(self, **fields: Any) -> None:
        """Set fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def condition(self, kind: Type) -> Condition | None:
        """The condition as it now stands, or None."""
        return next((item for item in self.status.conditions if item.type == kind), None)

    def holds(self, kind: Type) -> bool:
        """Whether a condition is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    def set(self, kind: Type, holds: bool | None, reason: Reason, message: str) -> None:
        """Set a condition; its transition time moves only when its status does."""
        conditions = with_condition(
            self.status.conditions,
            kind,
            holds,
            reason,
            message,
            now=self.now,
            generation=self.job.generation,
        )
        self.update(conditions=conditions)

    def fail(self, reason: Reason, message: str) -> None:
        """The job has failed for good."""
        self.set(Type.FAILED, True, reason, message)
        self.update(completion_time=self.now)

    def stop_children(self) -> None:
        """Delete every child Job still at work, and its pods."""
        for item in self.observed.jobs.values():
            if not job_ended(item):
                self.remove(item)

    def remove(self, child: Json) -> None:
        """Delete a child Job and its pods, unless that is under way."""
        item = Deletion(child["metadata"]["name"], child["metadata"]["uid"])
        if "deletionTimestamp" not in child["metadata"] and item not in self.delete:
            self.delete.append(item)

    def look_again(self, seconds: float) -> None:
        """Come back after this time at the latest."""
        before = self.requeue_seconds
        self.requeue_seconds = seconds if before is None else min(seconds, before)

    def conclude(self) -> Decision:
        """The finished decision."""
        return Decision(
            status=self.status,
            apply=tuple(self.apply),
            delete=tuple(self.delete),
            sweep=self.sweep,
            actions=tuple(self.actions),
            requeue_seconds=self.requeue_seconds,
        )
