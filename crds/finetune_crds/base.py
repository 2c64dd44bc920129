"""What every part of the API shares: the model base class, CEL rules and bounded string types."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

Json = dict[str, Any]
"""A Kubernetes object, or a part of one, as plain JSON."""

# NB: the API server estimates the cost of a CEL rule from the longest value a field may hold, and refuses a
# CRD whose rules could cost too much. So every string, list and map of the API has a bound.
Name = Annotated[str, Field(min_length=1, max_length=253)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
LongText = Annotated[str, Field(min_length=1, max_length=16384)]
Uri = Annotated[str, Field(min_length=1, max_length=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
Passthrough = Annotated[
    dict[str, Any], Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


class ApiModel(BaseModel):
    """A part of the API: snake_case in Python, camelCase in YAML; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )

    def to_json(self) -> dict[str, Any]:
        """The part as in YAML: camelCase, without fields that are not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules, as (expression, message), for a model's ``json_schema_extra``."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def immutable(field: str, message: str) -> tuple[str, str]:
    """The rule that a field never changes: neither its value, nor whether it is set."""
    both = f"has(self.{field}) == has(oldSelf.{field})"
    return f"{both} && (!has(self.{field}) || self.{field} == oldSelf.{field})", message
