"""`status` of a ModelPromotion: what the operator has to say."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, NonNegative
from finetune_crds.conditions import Conditions
from finetune_crds.serving import ServingStatus

PromotionPhase = Literal[
    "Pending",
    "Evaluating",
    "AwaitingApproval",
    "Soaking",
    "Promoting",
    "RollingOut",
    "Promoted",
    "RolledBack",
    "Suspended",
    "Refused",
    "Drifted",
    "Conflict",
    "Failed",
]
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
    """What one gate says of the candidate."""

    name: str
    """Name of the gate."""
    verdict: Verdict
    """Inconclusive: something to judge by is missing, and is waited for."""
    value: str | None = None
    """What the candidate has: a number, or a tag's value."""
    limit: str | None = None
    """What it is held against, such as <= 2.5."""
    holder: str | None = None
    """What the present holder of the alias has, in a comparison."""
    message: _Sentence
    """The same in a sentence."""


class GatesStatus(ApiModel):
    """What the gates say of a version."""

    version: _Version
    """The version that was judged."""
    holder: _Version | None = None
    """The version that held the alias then."""
    digest: str
    """Digest of spec.gates at that time."""
    summary: str
    """Gates passed of all, such as 2/3."""
    verdicts: Annotated[list[GateVerdict], Field(max_length=64)] = Field(default_factory=list)
    """One for each gate, in the order of the spec."""


class ApprovalStatus(ApiModel):
    """Where the approval of a version stands."""

    version: _Version
    """The version that waits, or was approved."""
    requested_at: datetime
    """Since when."""
    expires_at: datetime | None = None
    """When it is refused."""
    approved_at: datetime | None = None
    """When the approval was seen."""


class SoakStatus(ApiModel):
    """Where the soak of a version stands."""

    version: _Version
    """The version that passed its gates."""
    since: datetime
    """When it passed."""
    until: datetime
    """When the alias may move."""


class Move(ApiModel):
    """A move of the alias. In the journal it is written down before it is made."""

    from_version: _Version | None = None
    """The version before; absent for none."""
    to_version: _Version | None = None
    """The version after; absent for none."""
    reason: MoveReason
    """Why, in one word."""
    message: _Sentence
    """Why, in a sentence."""
    by: Annotated[str, Field(max_length=512)]
    """Who: the approver, or who last changed the spec, or the registry's user unknown to us."""
    at: datetime
    """When."""
    gates: str | None = None
    """Digest of the gates that the version passed; absent when none were asked."""
    approved: bool | None = None
    """Whether a person approved it; absent when nobody was asked."""


class RollbackStatus(ApiModel):
    """What spec.rollbackTo came to mean; decided once, when it was first seen."""

    requested: str
    """spec.rollbackTo."""
    version: _Version
    """The version it stands for."""


class Withheld(ApiModel):
    """A version that is not promoted although its gates may pass, until something changes."""

    version: _Version
    """The version."""
    reason: Literal["Adopted", "Withdrawn"]
    """Adopted: somebody moved the alias elsewhere. Withdrawn: its endpoint failed."""
    digest: str
    """Digest of spec.gates and spec.serving then; after Withdrawn, another one gives the version a new chance."""
    back: _Version | None = None
    """After Withdrawn: the version that gets the alias back, as the endpoint goes back to it; absent where no version had
    the alias before, so that it is removed."""
    message: _Sentence
    """Why, in a sentence."""


class ModelPromotionStatus(ApiModel):
    """What the operator has to say."""

    phase: PromotionPhase | None = None
    """One word for where the promotion stands; derived from the conditions."""
    observed_generation: NonNegative | None = None
    """Generation of the spec that this status is about."""
    current: _Version | None = None
    """The version that the alias points at, as the registry last said."""
    promoted: _Version | None = None
    """The version that the alias should point at: where this resource last put it, found it, or let it be."""
    previous: _Version | None = None
    """The version before it: where rollbackTo: Previous goes."""
    candidate: _Version | None = None
    """The version that the source names."""
    source: Annotated[str, Field(max_length=512)] | None = None
    """Where the candidate came from."""
    watched_since: datetime | None = None
    """Since when the alias is watched: where it was then is where things start, and a later hand is drift."""
    gates: GatesStatus | None = None
    """What the gates say of the candidate."""
    approval: ApprovalStatus | None = None
    """Where the approval of the candidate stands."""
    soak: SoakStatus | None = None
    """Where the soak of the candidate stands."""
    move: Move | None = None
    """The journal: a move that is under way."""
    abandoned: Move | None = None
    """A move that was journalled and then given up, `at` that time; it is put back should its write still arrive."""
    rollback: RollbackStatus | None = None
    """What spec.rollbackTo came to mean."""
    withheld: Withheld | None = None
    """A version that is passed over."""
    serving: ServingStatus | None = None
    """The endpoint."""
    history: Annotated[list[Move], Field(max_length=20)] = Field(default_factory=list)
    """The last 20 moves, newest first."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions, as in the Kubernetes API conventions."""
