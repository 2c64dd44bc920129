"""What every part of the API shares: the model base class, CEL rules and bounded string types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

VALIDATIONS = "x-kubernetes-validations"
REPLACED = "x-replaced-fields"
"""Fields of an earlier version in the schema of a model; `structural` turns each into a field that the API server refuses."""
BY_RULE = "x-required-by-rule"
"""Fields that a model requires, and that `structural` leaves out of `required`, since a rule requires them."""
LATE: dict[str, Any] = {"x-late-default": True}
"""Schema of a field without a default in the CRD: the operator fills it in, after that of the installation. The description names it."""

Json = dict[str, Any]
"""A Kubernetes object, or a part of one, as plain JSON."""


class Rule(NamedTuple):
    """A CEL rule.

    Attributes:
        expression: what must hold.
        message: what the API server says when it does not.
        field: the field that is at fault, as a path below the object, such as `.warmupSteps`; empty for the object.
        computed: a CEL expression that makes the message from the values; `message` stands in the documentation. NB: the
            API server takes the text of a number to be of any length, so a message with a number costs too much.
        at_creation: whether objects that exist are not held to it. For rules of fields that cannot change, which an earlier version
            did not have: an object that it took could not be changed in any other field.
    """

    expression: str
    message: str
    field: str = ""
    computed: str = ""
    at_creation: bool = False

    def to_json(self) -> dict[str, str | bool]:
        """The rule as it stands in a CustomResourceDefinition."""
        validation: dict[str, str | bool] = {"rule": self.expression, "message": self.message}
        if self.at_creation:
            validation = {
                "rule": f"oldSelf.hasValue() || ({self.expression})",
                "message": self.message,
                "optionalOldSelf": True,
            }
        validation |= {"fieldPath": self.field} if self.field else {}
        return validation | ({"messageExpression": self.computed} if self.computed else {})


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Return names as they stand in a sentence: `a`, `a and b`, or `a, b and c`; empty without a name."""
    *leading, last = names or [""]
    return f"{', '.join(leading)} {conjunction} {last}" if leading else last


def rules(*entries: Rule | tuple[str, str] | tuple[str, str, str]) -> dict[str, Any]:
    """CEL rules, as (expression, message, field), for a model's ``json_schema_extra``."""
    return {VALIDATIONS: [Rule(*entry).to_json() for entry in entries]}


def replaced(**fields: tuple[str, str]) -> dict[str, Any]:
    """Fields of an earlier version, as (type, message), for a model's ``json_schema_extra``: the API server refuses them.

    Without them it would drop the field, and the job would run without its GPUs or credentials.
    """
    return {REPLACED: fields}


def required_by_rule(*fields: str) -> dict[str, Any]:
    """Required fields that a rule requires in the CRD, for a model's ``json_schema_extra``.

    The API server reads no rule of an object that lacks a field of the schema's `required`, and would not say where that field was
    in an earlier version.
    """
    return {BY_RULE: list(fields)}


# NB: the API server estimates the cost of a CEL rule from the longest value a field may hold, and refuses a
# CRD whose rules could cost too much. So every string, list and map of the API has a bound.
Name = Annotated[str, Field(min_length=1, max_length=253)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
"""The value of a label."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
LongText = Annotated[str, Field(min_length=1, max_length=16384)]
Uri = Annotated[str, Field(min_length=1, max_length=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]
# A zero that is written out is not another setting.
NONE_FOR_ZERO = AfterValidator(lambda value: value or None)
Positive = Annotated[int, Field(ge=1)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"),
]
"""An amount of memory, as Kubernetes writes it."""
Passthrough = Annotated[
    dict[str, Any], Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]


PLACES = "s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute path"
"""What a folder may be, for messages."""
STORED_FOLDER = "^(/.|(s3a?|gs)://[^/ ]+/.|abfss://[^/@ ]+@[^/@ ]+/.)"
"""What a folder that jobs write matches: one in an object store, or an absolute path."""


# Names that Kubernetes checks when it gets them in a child: here the API server refuses them with the resource itself.
_LABEL = "[a-z0-9]+(-+[a-z0-9]+)*"
SUBDOMAIN = "[a-z0-9]+((-+|[.])[a-z0-9]+)*"
_LETTERS = "lowercase letters and digits, with '-' and '.' only between them"
ENV_NAME = "([-_a-zA-Z]|[.][-_a-zA-Z0-9])[-._a-zA-Z0-9]*"
_ENV_MESSAGE = "an environment variable's name can contain letters, digits, '_', '-' and '.', and cannot begin with a digit or '..'"


def _matching(pattern: str, message: str) -> dict[str, Any]:
    return rules((f"self.matches('^{pattern}$')", message))


ObjectName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        json_schema_extra=_matching(SUBDOMAIN, f"an object's name must consist of {_LETTERS}"),
    ),
]
"""The name of a Secret, a ConfigMap, a claim or another object of the namespace."""
QueueName = Annotated[
    str,
    Field(
        max_length=63,
        json_schema_extra=_matching(f"({SUBDOMAIN})?", f"a queue's name must consist of {_LETTERS}"),
    ),
]
"""The name of a Kueue LocalQueue, which becomes the value of a label; empty for none."""
VolumeName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=63,
        json_schema_extra=_matching(
            _LABEL,
            "a volume's name must consist of lowercase letters and digits, with '-' only between them",
        ),
    ),
]
"""The name of a volume of a pod template."""
EnvName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        json_schema_extra=_matching(ENV_NAME, _ENV_MESSAGE),
    ),
]
"""The name of an environment variable, or the beginning of one."""
EnvMap = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=64,
        json_schema_extra=rules((f"self.all(name, name.matches('^{ENV_NAME}$'))", _ENV_MESSAGE)),
    ),
]
"""Environment variables by their names."""
Image = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=_matching("[^ ]+", "an image's name cannot contain spaces"),
    ),
]
"""The name of a container image."""


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Where the first mistake of a document is, as a path of fields, and what it is."""
    first = error.errors()[0]
    what = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return ".".join(str(part) for part in first["loc"]) or "the top", what


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


A_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
"""Schema of a list without an order, whose items are unique: several writers can each apply their own."""


def by_key(name: str) -> dict[str, Any]:
    """Schema of a list whose items are unique by a field: several writers can each apply their own."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [name]}


def immutable(field: str, message: str) -> Rule:
    """The rule that a field never changes: neither its value, nor whether it is set."""
    both = f"has(self.{field}) == has(oldSelf.{field})"
    unchanged = f"{both} && (!has(self.{field}) || self.{field} == oldSelf.{field})"
    return Rule(unchanged, message, f".{field}")
