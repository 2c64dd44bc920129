"""The draft of a decision. Policies read the job and what was observed, and write to the draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.batch.state import has_ended, is_being_deleted
from finetune_operator.finetunejob.decision import Action, Decision, Deletion, SpecChange, TakeLease
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.policy.status import StatusBuilder
from finetune_operator.settings import Settings

# Failures that a correction of the spec or the data prevents. A finished job does not pick up the correction.
_CORRECTABLE_REASONS: frozenset[str] = frozenset(
    {ConditionReason.INVALID_SPEC, ConditionReason.RECIPE_WRONG, ConditionReason.DATA_WRONG}
)
_REAPPLY_HINT = "this job has finished: create a FineTuneJob with another name and the correction, or delete this job first"
# Without events and changes of the status, the next pass is due after this share of the time since the last change.
_QUIET_SHARE = 0.25
_MAX_POLL_SECONDS = 60.0


@dataclass
class Draft(StatusBuilder[FineTuneJobStatus]):
    """One pass over one job. `status` starts as the current one and becomes the new one. `Decision` explains the fields after `status`."""

    ftj: FineTuneJob
    observed: Observed
    now: datetime
    settings: Settings
    status: FineTuneJobStatus = field(init=False)
    lease: TakeLease | None = None
    apply: list[Json] = field(default_factory=list)
    delete: list[Deletion] = field(default_factory=list)
    scaled: list[Json] = field(default_factory=list)
    changed: list[SpecChange] = field(default_factory=list)
    deletes_all: bool = False
    actions: list[Action] = field(default_factory=list)
    finalizer: bool | None = None
    dry_runs: list[Json] = field(default_factory=list)
    suggestions: Json | None = None
    requeue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.status = self.ftj.status

    @property
    def generation(self) -> int:
        """Generation of the spec."""
        return self.ftj.generation

    @property
    def spec(self) -> FineTuneJobSpec:
        """The spec. Policies read it only after `accept` has accepted the job."""
        if self.ftj.spec is None:
            raise ValueError(f"the spec of {self.ftj.key} was not accepted")
        return self.ftj.spec

    def poll(self) -> None:
        """Request a pass after the poll interval or, if the status has not changed for long, after a longer time.

        For changes that no watch reports: the progress in MLflow, and the Events about pods that wait.
        """
        progress_time = self.status.progress.update_time if self.status.progress else None
        changes = [item.last_transition_time for item in self.ftj.status.conditions]
        changes += [time for time in (self.status.start_time, progress_time) if time]
        quiet_seconds = (self.now - max(changes, default=self.now)).total_seconds()
        longest = max(_MAX_POLL_SECONDS, self.settings.poll_seconds)
        self.requeue_after(min(max(quiet_seconds * _QUIET_SHARE, self.settings.poll_seconds), longest))

    def record_start(self) -> None:
        """Record the start time: the job's first child exists, or is about to be created."""
        if self.status.start_time is None:
            self.update(start_time=self.now)

    def fail(self, reason: ConditionReason, message: str) -> None:
        """Mark the job as failed, which is final. If a correction helps, the message explains how to apply it."""
        # The message may quote that of another job, which has the hint.
        needs_hint = reason in _CORRECTABLE_REASONS and _REAPPLY_HINT not in message
        again = f"; {_REAPPLY_HINT}" if needs_hint else ""
        self.set(ConditionType.FAILED, True, reason, f"{message}{again}")
        self.update(completion_time=self.now)

    def unset(self, kind: ConditionType) -> None:
        """Remove a condition that no longer applies."""
        self.update(conditions=[item for item in self.status.conditions if item.type != kind])

    def set_since(self, kind: ConditionType, reason: ConditionReason, message: str) -> float:
        """Set a condition to False, and return the seconds for which it has had this message.

        NB: the condition may have been False before for another reason, such as an outage. So a new message restarts its time.
        """
        before = self.condition(kind)
        if before is None or before.message != message:
            self.unset(kind)
        self.set(kind, False, reason, message)
        after = self.condition(kind)
        return (self.now - after.last_transition_time).total_seconds() if after else 0.0

    def stop_children(self) -> None:
        """Delete every child Job that still runs, and its pods."""
        for item in self.observed.jobs.values():
            if not has_ended(item):
                self.remove(item)

    def remove(self, child: Json, kind: str = "Job") -> None:
        """Delete a child, and the pods of a Job, unless the child is already being deleted."""
        item = Deletion(child["metadata"]["name"], child["metadata"]["uid"], kind)
        if not is_being_deleted(child) and item not in self.delete:
            self.delete.append(item)

    def scale(self, job: Json, parallelism: int) -> None:
        """Let a Job run this number of pods at a time."""
        meta = job["metadata"]
        self.scaled.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {name: meta[name] for name in ("name", "namespace", "uid")},
                "spec": {"parallelism": parallelism},
            }
        )

    def free_name(self, job: Json) -> None:
        """Delete a Job that is already being deleted, this time without waiting for its pods, so that its name is free."""
        self.delete.append(Deletion(job["metadata"]["name"], job["metadata"]["uid"], frees_name=True))

    def conclude(self) -> Decision:
        """The finished decision."""
        return Decision(
            status=self.status,
            lease=self.lease,
            apply=tuple(self.apply),
            delete=tuple(self.delete),
            scaled=tuple(self.scaled),
            changed=tuple(self.changed),
            deletes_all=self.deletes_all,
            actions=tuple(self.actions),
            finalizer=self.finalizer,
            dry_runs=tuple(self.dry_runs),
            suggestions=self.suggestions,
            requeue_seconds=self.requeue_seconds,
        )
