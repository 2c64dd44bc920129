"""Approvals of versions by people."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from finetune_crds.base import YEAR_IN_SECONDS, ApiModel, ReplacedField, list_type_map, replaced
from finetune_crds.version_number import VersionNumber

MAX_APPROVALS = 16


class ApprovalEntry(ApiModel):
    """The approval of a version by a person."""

    version: VersionNumber
    """The approved version; the approval does not apply to any other version."""
    by: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the person."""


Approvals = Annotated[
    list[ApprovalEntry], Field(max_length=MAX_APPROVALS, json_schema_extra=list_type_map("by"))
]


class Approval(ApiModel):
    """How a version waits for approval. A version that passed its gates waits, even if no field is set."""

    model_config = ConfigDict(
        json_schema_extra=replaced(
            version=ReplacedField(
                "integer or string", "approval.version", "replaced by approvals: [{version, by}]"
            ),
            by=ReplacedField("string", "approval.by", "replaced by approvals: [{version, by}]"),
        )
    )

    bypass_soak: bool | None = None
    """Skip the rest of soakSeconds once the version is approved."""
    timeout_seconds: Annotated[int, Field(ge=1, le=YEAR_IN_SECONDS)] | None = None
    """The version is refused if it is not approved within this time. Default: no limit."""
