"""`status` of a ModelPromotion, which the operator writes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from finetune_crds.approvals import MAX_APPROVALS
from finetune_crds.base import ApiModel, list_type_map
from finetune_crds.conditions import UNSEEN, Conditions, ObservedGeneration
from finetune_crds.gates import MAX_JOB_GATES
from finetune_crds.serving import ServingStatus

PromotionPhase = Literal[
    "Pending",
    "AwaitingApproval",
    "Soaking",
    "Promoting",
    "Promoted",
    "Refused",
    "Blocked",
    "Suspended",
]


def _drop_unknown_phase(value: object) -> object:
    """Return None for a phase that only another version of the operator has. Each pass derives the phase from the conditions again."""
    return value if value in get_args(PromotionPhase) else None


Verdict = Literal["Passed", "Failed", "Inconclusive"]
MoveReason = Literal[
    "Promoted",
    "RolledBack",
    "Reverted",
    "Repaired",
    "Adopted",
    "Withdrawn",
    "Regressed",
    "Overtaken",
    "VersionDeleted",
]
"""The reason why an alias points at another version.

- Promoted: the version passed its gates.
- RolledBack: spec.rollbackTo names the version.
- Reverted: the source names a version that passed the same gates before.
- Repaired: the operator moved the alias back after someone else moved it.
- Adopted: someone else moved the alias, and onDrift is Adopt.
- Withdrawn: the endpoint of the version failed.
- Regressed: the number of spec.onRegression was out of bounds for too long.
- Overtaken: someone else moved the alias faster than the operator.
- VersionDeleted: someone deleted the version that the alias pointed at.
"""

_Version = Annotated[str, Field(max_length=32)]
_Sentence = Annotated[str, Field(max_length=4096)]


class GateVerdict(ApiModel):
    """The verdict of one gate on the candidate."""

    name: str
    """Name of the gate."""
    verdict: Verdict
    """Passed, Failed, or Inconclusive while something that the gate needs is missing."""
    value: str | None = None
    """The candidate's value: a number, or the value of a tag."""
    limit: str | None = None
    """Bound or required value, such as <= 2.5."""
    holder: str | None = None
    """Value of the version that the alias points at, in a comparison."""
    message: _Sentence
    """The verdict in a sentence."""


class GatesStatus(ApiModel):
    """The verdicts of the gates on a version."""

    version: _Version
    """The version that was evaluated."""
    holder: _Version | None = None
    """The version that the alias pointed at then."""
    digest: str
    """Digest of spec.gates at the evaluation."""
    summary: str
    """Gates that passed, out of all gates, such as 2/3."""
    verdicts: Annotated[list[GateVerdict], Field(max_length=64)] = Field(default_factory=list)
    """The verdict of each gate, in the order of the spec."""


MAX_GATE_RESULTS = 2 * MAX_JOB_GATES
"""Enough for every Job of the candidate and of the version that the alias points at."""
MAX_GATE_NUMBERS = 24
MAX_GATE_MESSAGE = 1000


class GateResult(ApiModel):
    """The result of a gate's Job, which does not run again for the same version."""

    version: _Version
    """The version that the Job judged."""
    digest: Annotated[str, Field(max_length=64)]
    """Digest of the field `job` of the gate."""
    job: Annotated[str, Field(max_length=63)]
    """Name of the Job, which is deleted a day after it has ended."""
    outcome: Literal["Succeeded", "Failed", "NotStarted"]
    """Succeeded, Failed, or NotStarted if no container ran within timeoutSeconds."""
    metrics: Annotated[
        dict[str, Annotated[str, Field(max_length=32)]], Field(max_length=MAX_GATE_NUMBERS)
    ] = Field(default_factory=dict)
    """The numbers that the Job reported, by name."""
    message: Annotated[str, Field(max_length=MAX_GATE_MESSAGE)] = ""
    """Why the Job failed or reported no numbers; empty otherwise."""
    run_id: Annotated[str, Field(max_length=256)] | None = None
    """The MLflow run of the Job."""
    time: datetime
    """When the operator recorded the result."""


class CopyStatus(ApiModel):
    """The version that source.registry names, and its copy."""

    uri: Annotated[str, Field(max_length=1024)]
    """Address of the server with the version."""
    model: Annotated[str, Field(max_length=768)]
    """The registered model there."""
    source_version: _Version
    """Number of the version there."""
    digest: Annotated[str, Field(max_length=64)]
    """Identity of the version: its address, number, run and creation time. The copy has it as the tag finetune_copy."""
    version: _Version | None = None
    """Number of the copy. Absent until it is complete."""


class ApprovalStatus(ApiModel):
    """The state of the approval of a version."""

    version: _Version
    """The version that waits for approval or was approved."""
    request_time: datetime
    """When the approval was requested."""
    expiration_time: datetime | None = None
    """When the operator refuses the version if it is not approved."""
    approval_time: datetime | None = None
    """When the operator saw the approval."""


class SoakStatus(ApiModel):
    """The soak time of a version."""

    version: _Version
    """The version that passed its gates."""
    start_time: datetime
    """When the version passed its gates."""
    end_time: datetime
    """When the alias may move."""


class Move(ApiModel):
    """A move of the alias. The operator records it in the journal before it moves the alias."""

    from_version: _Version | None = None
    """The version before the move. It is absent if there was none."""
    to_version: _Version | None = None
    """The version after the move. It is absent if the alias was removed."""
    reason: MoveReason
    """Reason for the move, as one word."""
    message: _Sentence
    """Reason for the move, in a sentence."""
    by: Annotated[str, Field(max_length=512)]
    """Who caused the move. It is the approver, the field manager that last changed the spec, or an unknown user of the
    registry."""
    time: datetime
    """When the move was made."""
    gates: str | None = None
    """Digest of the gates that the version passed. It is absent for a move without gates."""
    approved: bool | None = None
    """Whether a person approved the move. It is absent if no approval was needed."""


class RollbackStatus(ApiModel):
    """The target of spec.rollbackTo, which the operator resolves once."""

    requested: str
    """The value of spec.rollbackTo."""
    version: _Version
    """The version that spec.rollbackTo resolved to."""


class Withheld(ApiModel):
    """A version that the operator does not promote, even if its gates pass, until something changes."""

    version: _Version
    """The version."""
    reason: Literal["Adopted", "Withdrawn", "Regressed"]
    """Adopted: someone moved the alias to another version. Withdrawn: the endpoint of the version failed. Regressed: the
    number of spec.onRegression was out of bounds for too long."""
    digest: str
    """Digest of spec.gates and spec.serving at that time. After Withdrawn, the operator tries the version again if either
    changes."""
    back: _Version | None = None
    """After Withdrawn and Regressed: the version that the alias and the endpoint return to. Absent if the alias had no version before; the
    alias is then removed."""
    message: _Sentence
    """Reason in a sentence."""


class Watch(ApiModel):
    """The version whose number `spec.onRegression` watches."""

    version: _Version
    """The version that the alias moved to."""
    start_time: datetime | None = None
    """When the time of the watch started. Absent while the endpoint does not serve the version alone."""
    inherited: bool | None = None
    """True if the number was out of bounds before the version had traffic, and has not been good since."""
    breach_time: datetime | None = None
    """Since when the number is out of bounds. Absent while no breach counts."""
    breach_seconds: float | None = None
    """Seconds of the breach that count."""
    reading_time: datetime | None = None
    """When they were last counted."""
    terms: str | None = None
    """Digest of the query and the bounds at that time."""


MAX_VERSION_RECORDS = 64
REGRESSED = "Regressed"
"""`VersionRecord.bad` of a version whose number got out of bounds. Unlike a failure at the endpoint, no change of the spec ends it."""


class VersionRecord(ApiModel):
    """A version, and what was decided about it."""

    version: _Version
    """Its number."""
    creation_time: datetime | None = None
    """When it was created."""
    run_id: Annotated[str, Field(max_length=256)] | None = None
    """The run that created it."""
    held: bool | None = None
    """True if it had the alias. Not by drift, nor if its endpoint failed."""
    gates: str | None = None
    """Digest of the gates that it passed. Absent if it must be judged again."""
    approved_by: str | None = None
    """Who approved it."""
    bad: str | None = None
    """Why it is not promoted again. The digest of the gates and spec.serving with which its endpoint failed, or Regressed."""
    skipped: bool | None = None
    """True if it is passed over. Someone moved the alias elsewhere, and onDrift is Adopt."""

    @property
    def is_withheld(self) -> bool:
        """Whether the version is not promoted, because it failed or is passed over."""
        return self.bad is not None or self.skipped is True


class RegistryIdentity(ApiModel):
    """Identity of the registered model, and what was decided about its versions.

    A registry has no id of its own, and another one may have a model of the same name.
    """

    model_creation_time: datetime | None = None
    """When the model was created."""
    has_decisions: bool | None = None
    """False if an earlier release wrote this."""
    versions: Annotated[
        list[VersionRecord],
        Field(max_length=MAX_VERSION_RECORDS, json_schema_extra=list_type_map("version")),
    ] = Field(default_factory=list)
    """The versions. If there are too many, the lowest are dropped."""


class Journal(ApiModel):
    """Internal state of the operator between two passes, so that a crash loses nothing."""

    move: Move | None = None
    """The move in progress."""
    abandoned: Move | None = None
    """A recorded move that the operator gave up at `time`. If the registry still makes it later, the operator moves the
    alias back, unless there is no version to move it back to."""
    withheld: Withheld | None = None
    """A version that the operator does not promote for now."""
    watch: Watch | None = None
    """The version that is watched after its move."""
    lost: str | None = None
    """The version whose deletion removed the alias, until the alias is set again."""
    untagged: str | None = None
    """The version that got the alias and does not have all of its tags yet."""
    old_approvals: Annotated[list[str], Field(max_length=MAX_APPROVALS)] | None = None
    """Digests of the approvals that were in the spec when the promotion started over. They do not count."""


class ModelPromotionStatus(ApiModel):
    """The state that the operator reports."""

    model: Annotated[str, Field(max_length=768)] | None = None
    """The registered model: spec.model, or the name of this resource."""
    phase: Annotated[PromotionPhase | None, BeforeValidator(_drop_unknown_phase)] = None
    """State of the promotion as one word, derived from the conditions. The reason of the condition Ready has details."""
    observed_generation: ObservedGeneration = UNSEEN
    """Generation of the spec that this status describes. It is -1 until the operator has seen the resource."""
    current: _Version | None = None
    """The version that the alias points at, as last read from the registry."""
    promoted: _Version | None = None
    """The version that the alias should point at. The operator last moved the alias there, or found or accepted it
    there."""
    passed: _Version | None = None
    """The version in `promoted`, if it passed its gates or a person chose it."""
    previous: _Version | None = None
    """The version before `promoted`, which rollbackTo Previous restores."""
    candidate: _Version | None = None
    """The version that the source names."""
    source: Annotated[str, Field(max_length=512)] | None = None
    """The source of the candidate."""
    copied: CopyStatus | None = None
    """The version that source.registry names, and its copy."""
    watch_start_time: datetime | None = None
    """When the operator started to watch the alias. A move by someone else after this time is drift."""
    registry: RegistryIdentity | None = None
    """Identity of the model and of the versions in this status. If the registry has others, the operator writes nothing."""
    gates: GatesStatus | None = None
    """The verdicts of the gates on the candidate."""
    gate_results: Annotated[list[GateResult], Field(max_length=MAX_GATE_RESULTS)] = Field(
        default_factory=list
    )
    """The last results of the Jobs of gates, newest first."""
    approval: ApprovalStatus | None = None
    """The state of the approval of the candidate."""
    soak: SoakStatus | None = None
    """The soak time of the candidate."""
    rollback: RollbackStatus | None = None
    """The target of spec.rollbackTo."""
    journal: Journal | None = None
    """Internal state of the operator between two passes. Its fields may change in any release."""
    serving: ServingStatus | None = None
    """The state of the endpoint."""
    history: Annotated[list[Move], Field(max_length=20)] = Field(default_factory=list)
    """The last 20 moves, newest first."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions, as in the Kubernetes API conventions."""

    @property
    def move(self) -> Move | None:
        """The move in progress."""
        return self.journal.move if self.journal else None

    @property
    def abandoned(self) -> Move | None:
        """The move that was given up."""
        return self.journal.abandoned if self.journal else None

    @property
    def watch(self) -> Watch | None:
        """The version that is watched after its move."""
        return self.journal.watch if self.journal else None

    @property
    def lost(self) -> str | None:
        """The version whose deletion removed the alias, until the alias is set again."""
        return self.journal.lost if self.journal else None

    @property
    def untagged(self) -> str | None:
        """The version that got the alias and does not have all of its tags yet."""
        return self.journal.untagged if self.journal else None

    def change_journal(self, **entries: Any) -> Journal | None:
        """Return the journal with other entries, of which None is none; None if it then has no entry."""
        journal = (self.journal or Journal()).model_copy(update=entries)
        return None if journal == Journal() else journal

    def find_record(self, version: str | None) -> VersionRecord | None:
        """What this promotion recorded about a version."""
        records = self.registry.versions if self.registry else []
        return next((item for item in records if item.version == version), None)

    @property
    def withheld(self) -> Withheld | None:
        """The version that the operator does not promote for now."""
        return self.journal.withheld if self.journal else None
