"""Steps of `spec.data.prepare` that look at what an example says."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import A_SET

RedactKind = Literal["Email", "Phone", "CardNumber", "Secret"]

Redact = Annotated[list[RedactKind], Field(min_length=1, max_length=4, json_schema_extra=A_SET)]

FIELDS = ("redact",)
"""The fields of Prepare that this module describes."""
