"""`status` of a ModelPromotion: what the operator reports."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from finetune_crds.base import ApiModel, list_type_map
from finetune_crds.conditions import UNSEEN, Conditions, ObservedGeneration
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
    """Read a phase of another version of the operator as none: the conditions say more, and each pass derives it from them."""
    return value if value in get_args(PromotionPhase) else None


Verdict = Literal["Passed", "Failed", "Inconclusive"]
MoveReason = Literal[
    "Promoted", "RolledBack", "Reverted", "Repaired", "Adopted", "Withdrawn", "Overtaken", "VersionDeleted"
]
"""Why an alias came to point elsewhere: it passed its gates; spec.rollbackTo; back at a version that had passed the same
gates before; back after somebody else moved it; somebody else moved it, and onDrift is Adopt; its endpoint failed; a move
that somebody else's hand was faster than; somebody deleted the version that had it."""

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
    """What the value is compared with, such as <= 2.5."""
    holder: str | None = None
    """The value of the version that the alias points at, in a comparison."""
    message: _Sentence
    """The verdict in a sentence."""


class GatesStatus(ApiModel):
    """The verdicts of the gates on a version."""

    version: _Version
    """The version that was evaluated."""
    holder: _Version | None = None
    """The version that the alias pointed at."""
    digest: str
    """Digest of spec.gates at that time."""
    summary: str
    """Number of gates that passed, of all, such as 2/3."""
    verdicts: Annotated[list[GateVerdict], Field(max_length=64)] = Field(default_factory=list)
    """The verdict of each gate, in the order of the spec."""


class ApprovalStatus(ApiModel):
    """The state of the approval of a version."""

    version: _Version
    """The version that waits for approval or was approved."""
    request_time: datetime
    """When the approval was requested."""
    expiration_time: datetime | None = None
    """When the version is refused without approval."""
    approval_time: datetime | None = None
    """When the operator saw the approval."""


class SoakStatus(ApiModel):
    """The soak time of a version."""

    version: _Version
    """The version that passed its gates."""
    start_time: datetime
    """When it passed."""
    end_time: datetime
    """When the alias may move."""


class Move(ApiModel):
    """A move of the alias. The journal records it before it is made."""

    from_version: _Version | None = None
    """The version before the move; absent when there was none."""
    to_version: _Version | None = None
    """The version after the move; absent when the alias was removed."""
    reason: MoveReason
    """Why, as one word."""
    message: _Sentence
    """Why, in a sentence."""
    by: Annotated[str, Field(max_length=512)]
    """Who caused it: the approver, the field manager that last changed the spec, or an unknown user of the registry."""
    time: datetime
    """When."""
    gates: str | None = None
    """Digest of the gates that the version passed; absent for a move without gates."""
    approved: bool | None = None
    """Whether a person approved it; absent when no person had to."""


class RollbackStatus(ApiModel):
    """The target of spec.rollbackTo; resolved once, when the operator first sees it."""

    requested: str
    """spec.rollbackTo."""
    version: _Version
    """The version that it resolved to."""


class Withheld(ApiModel):
    """A version that the operator does not promote, even if its gates pass, until something changes."""

    version: _Version
    """The version."""
    reason: Literal["Adopted", "Withdrawn"]
    """Adopted: someone moved the alias to another version. Withdrawn: its endpoint failed."""
    digest: str
    """Digest of spec.gates and spec.serving at that time. After Withdrawn, a change of either gives the version a new
    chance."""
    back: _Version | None = None
    """After Withdrawn: the version that alias and endpoint go back to; absent when the alias had no version before, and is
    removed."""
    message: _Sentence
    """Why, in a sentence."""


class VersionIdentity(ApiModel):
    """What tells a version from one of the same number in another registry."""

    version: _Version
    """Its number."""
    creation_time: datetime | None = None
    """When it was created."""
    run_id: Annotated[str, Field(max_length=256)] | None = None
    """The run that made it."""


class RegistryIdentity(ApiModel):
    """What tells the registered model from one of the same name in another registry.

    A registry has no identity of its own.
    """

    model_creation_time: datetime | None = None
    """When the model was created."""
    versions: Annotated[
        list[VersionIdentity],
        Field(
            max_length=64,
            json_schema_extra=list_type_map("version"),
        ),
    ] = Field(default_factory=list)
    """The versions that this status names."""


class Journal(ApiModel):
    """What the operator remembers between two passes, so that a crash between them loses nothing."""

    move: Move | None = None
    """The move in progress."""
    abandoned: Move | None = None
    """A move that was recorded and then given up, at its `time`. If its write still arrives, the operator moves the alias
    back, unless there is no version to move it back to."""
    withheld: Withheld | None = None
    """A version that the operator does not promote for now."""


class ModelPromotionStatus(ApiModel):
    """What the operator reports."""

    model: Annotated[str, Field(max_length=768)] | None = None
    """The registered model: spec.model, or the name of this resource."""
    phase: Annotated[PromotionPhase | None, BeforeValidator(_drop_unknown_phase)] = None
    """Where the promotion stands, as one word; derived from the conditions. The reason of the condition Ready says more."""
    observed_generation: ObservedGeneration = UNSEEN
    """Generation of the spec that this status describes. Default: -1, until the operator has seen the resource."""
    current: _Version | None = None
    """The version that the alias points at, as last read from the registry."""
    promoted: _Version | None = None
    """The version that the alias should point at: where the operator last moved, found or accepted it."""
    passed: _Version | None = None
    """`promoted`, if that version passed its gates or a person chose it."""
    previous: _Version | None = None
    """The version before `promoted`: the target of rollbackTo: Previous."""
    candidate: _Version | None = None
    """The version that the source names."""
    source: Annotated[str, Field(max_length=512)] | None = None
    """The source of the candidate."""
    watch_start_time: datetime | None = None
    """Since when the operator watches the alias. A move by someone else after this time is drift."""
    registry: RegistryIdentity | None = None
    """The model and the versions that this status is about. If the registry holds others, the operator writes nothing."""
    gates: GatesStatus | None = None
    """The verdicts of the gates on the candidate."""
    approval: ApprovalStatus | None = None
    """The state of the approval of the candidate."""
    soak: SoakStatus | None = None
    """The soak time of the candidate."""
    rollback: RollbackStatus | None = None
    """The target of spec.rollbackTo."""
    journal: Journal | None = None
    """Internal: what the operator remembers between two passes. Its fields may change in any release."""
    serving: ServingStatus | None = None
    """The endpoint."""
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
    def withheld(self) -> Withheld | None:
        """The version that the operator does not promote for now."""
        return self.journal.withheld if self.journal else None
