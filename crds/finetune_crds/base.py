"""Shared parts of the API: the base class of its models, CEL rules, and bounded types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

WEEK_IN_SECONDS = 7 * 24 * 3600
"""The longest time of gates, canaries, windows and watches."""
YEAR_IN_SECONDS = 366 * 24 * 3600
"""The longest time for soaking and approvals."""

VALIDATIONS = "x-kubernetes-validations"
REPLACED = "x-replaced-fields"
"""Schema key of a model: the fields that an earlier version had. `schema.structural` adds them as fields that the API server
refuses."""
REQUIRED_BY_RULE = "x-required-by-rule"
"""Schema key of a model: required fields that `schema.structural` removes from `required`, because a CEL rule requires them."""
OPERATOR_DEFAULT: dict[str, Any] = {"x-operator-default": True}
"""Schema of a field whose default is not in the CRD, but in the description: the operator applies this default where neither the
spec nor the chart sets the field."""

Json = dict[str, Any]
"""A Kubernetes object, or a part of one, as plain JSON."""


class Rule(NamedTuple):
    """A CEL rule.

    Attributes:
        expression: the CEL expression that must be true.
        message: the error of the API server if the expression is false.
        field: the path of the field to change, below the object with the rule, such as `.warmupSteps`; empty for the object
            itself.
        computed: a CEL expression that builds the error from values of the object; only the documentation shows `message`. NB: the
            API server assumes no maximum length for a number as text, so a message with a number exceeds the cost limit.
        at_creation: whether the rule is checked only when its object is set for the first time. Use it for a new rule on a
            field that cannot change: otherwise, an object that an earlier version accepted could not be updated at all.
    """

    expression: str
    message: str
    field: str = ""
    computed: str = ""
    at_creation: bool = False

    def to_json(self) -> dict[str, str | bool]:
        """Return the rule as JSON of a CustomResourceDefinition."""
        validation: dict[str, str | bool] = {"rule": self.expression, "message": self.message}
        if self.at_creation:
            validation["rule"] = f"oldSelf.hasValue() || ({self.expression})"
            validation["optionalOldSelf"] = True
        if self.field:
            validation["fieldPath"] = self.field
        if self.computed:
            validation["messageExpression"] = self.computed
        return validation


def join_names(names: Sequence[str], conjunction: str = "and") -> str:
    """Join names for a sentence: `a`, `a and b`, or `a, b and c`; empty without names."""
    *leading, last = names or [""]
    return f"{', '.join(leading)} {conjunction} {last}" if leading else last


def rules(*entries: Rule | tuple[str, str] | tuple[str, str, str]) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a model with CEL rules. A tuple is (expression, message, field)."""
    # A Rule is a tuple of all its fields, so `Rule(*entry)` is a copy of it.
    return {VALIDATIONS: [Rule(*entry).to_json() for entry in entries]}


class ReplacedField(NamedTuple):
    """A field that an earlier version had, and that the API server refuses.

    Attributes:
        kind: the JSON type of the field, or integer or string.
        path: the path of the field in the error, such as training.overlong.
        outcome: the rest of the error after `path was`, such as replaced by training.truncation.
    """

    kind: str
    path: str
    outcome: str

    @property
    def message(self) -> str:
        """The error of the API server, which names the field itself."""
        return self.outcome

    @property
    def description(self) -> str:
        """The description of the field in the CRD."""
        return f"{self.outcome[:1].upper()}{self.outcome[1:]}."


def replaced(**fields: ReplacedField) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a model with fields that an earlier version had.

    Without this, the API server would drop such a field, and a job would run, for example, without its GPUs or credentials.
    """
    return {REPLACED: fields}


def required_by_rule(*fields: str) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a model with fields that a CEL rule requires, instead of `required` in the CRD.

    If an object lacks a field that the schema requires, the API server evaluates none of the object's rules. No rule could then
    explain that the missing field replaces a field of an earlier version.
    """
    return {REQUIRED_BY_RULE: list(fields)}


# NB: the API server estimates the cost of a CEL rule from the longest value that a field accepts, and refuses a CRD whose rules
# cost too much. So every string, list and map of the API has a maximum size.
Name = Annotated[str, Field(min_length=1, max_length=253)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
"""The value of a label."""
Text = Annotated[str, Field(min_length=1, max_length=1024)]
LongText = Annotated[str, Field(min_length=1, max_length=16384)]
Uri = Annotated[str, Field(min_length=1, max_length=1024)]
ServerAddress = Annotated[str, Field(max_length=1024, pattern="^https?://[^?#@ ]+$")]
"""Address of an HTTP server, without a login."""
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[int, Field(ge=0)]
# An explicit zero is the same setting as an absent field.
NONE_FOR_ZERO = AfterValidator(lambda value: value or None)
Positive = Annotated[int, Field(ge=1)]
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"),
]
"""An amount of memory as a Kubernetes quantity, such as 2Gi."""
Passthrough = Annotated[
    dict[str, Any], Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
"""A part of another Kubernetes object, such as a pod template. The CRD does not list its fields."""


FOLDER_FORMATS = "s3://bucket/folder, gs://bucket/folder, abfss://container@host/folder, or an absolute path"
"""Formats of a folder's address, for messages."""
STORED_FOLDER_PATTERN = "^(/.|(s3a?|gs)://[^/ ]+/.|abfss://[^/@ ]+@[^/@ ]+/.)"
"""Pattern of a folder that jobs write: a folder in an object store, or an absolute path."""
SHARED_FOLDER_FORMATS = f"{FOLDER_FORMATS} on a volume; pods cannot reach DBFS"
"""Formats of `is_shared_folder`, for messages."""


def value_or_empty(field: str) -> str:
    """Return the CEL expression of an optional text, and of an empty text if it is not set."""
    return f"has({field}) ? {field} : ''"


def list_splits(path: str) -> str:
    """Return the CEL expression of the texts of the three splits at a path, with an empty text for a split that is not set."""
    splits = (value_or_empty(f"{path}.{split}") for split in ("train", "validation", "test"))
    return f"[{', '.join(splits)}]"


def is_shared_folder(uri: str) -> str:
    """Return the CEL condition that training pods can write the folder at an address: the pattern has no dbfs:/, but /dbfs."""
    return f"{uri}.matches('{STORED_FOLDER_PATTERN}') && !{uri}.startsWith('/dbfs/')"


# Names of objects, volumes and variables. Kubernetes checks them only when the operator creates an object with them; these patterns
# and the rule refuse a wrong name earlier, in the resource itself.
_LABEL = "[a-z0-9]+(-+[a-z0-9]+)*"
SUBDOMAIN = "[a-z0-9]+((-+|[.])[a-z0-9]+)*"
ENV_NAME = "([-_a-zA-Z]|[.][-_a-zA-Z0-9])[-._a-zA-Z0-9]*"


def _matching(pattern: str) -> dict[str, Any]:
    """Return the schema of a text that matches a pattern from its start to its end.

    NB: only the API server checks the pattern. pydantic would also check it in the operator, which then could not read an object that
    an earlier version accepted.
    """
    return {"pattern": f"^{pattern}$"}


ObjectName = Annotated[str, Field(min_length=1, max_length=253, json_schema_extra=_matching(SUBDOMAIN))]
"""The name of a Secret, a ConfigMap, a claim or another object of the namespace."""
QueueName = Annotated[str, Field(max_length=63, json_schema_extra=_matching(f"({SUBDOMAIN})?"))]
"""The name of a Kueue LocalQueue; empty for no queue. It becomes the value of a label."""
VolumeName = Annotated[str, Field(min_length=1, max_length=63, json_schema_extra=_matching(_LABEL))]
"""The name of a volume of a pod template."""
EnvName = Annotated[str, Field(min_length=1, max_length=253, json_schema_extra=_matching(ENV_NAME))]
"""The name of an environment variable, or a prefix of such names."""
EnvMap = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(
        max_length=64,
        json_schema_extra=rules(
            (
                f"self.all(name, name.matches('^{ENV_NAME}$'))",
                "an environment variable's name can contain letters, digits, '_', '-' and '.', and cannot begin with a digit or '..'",
            )
        ),
    ),
]
"""Environment variables by name."""
Image = Annotated[str, Field(min_length=1, max_length=1024, json_schema_extra=_matching("[^ ]+"))]
"""The name of a container image."""


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first invalid field of a document (`the top` for the document itself), and the error."""
    first = error.errors()[0]
    problem = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return ".".join(str(part) for part in first["loc"]) or "the top", problem


class ApiModel(BaseModel):
    """A model of the API. Fields are snake_case in Python and camelCase in YAML; unknown fields are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )

    def to_json(self) -> dict[str, Any]:
        """Return the model as in YAML: camelCase names, without fields that are not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


LIST_TYPE_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
"""Schema of a list with unique items and no order. With server-side apply, several writers can each apply their own items."""


def list_type_map(*keys: str) -> dict[str, Any]:
    """Return the schema of a list whose items are unique by their keys. With server-side apply, several writers can each apply their own items."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [*keys]}


def build_immutability_rule(
    optional_fields: Sequence[str], fields: Sequence[str], *, message: str, ending: str
) -> Rule:
    """Return the rule of a spec that an update changes none of some fields. Its error names the fields that the update changes.

    Args:
        optional_fields: fields that an object can lack.
        fields: fields that every object has.
        message: what can change and what to do instead, for the documentation.
        ending: the error after the names of the fields.
    """
    conditions = {field: is_unchanged(field) for field in optional_fields} | {
        field: f"self.{field} == oldSelf.{field}" for field in fields
    }
    # NB: the API server refuses the cost of a list of names that is filtered and joined.
    changed_fields = " + ".join(
        f"({condition} ? '' : 'spec.{field} ')" for field, condition in conditions.items()
    )
    expression = " && ".join(f"({condition})" for condition in conditions.values())
    return Rule(expression, message, computed=f"{changed_fields} + '{ending}'")


def is_unchanged(field: str) -> str:
    """Return the CEL condition that an update does not change, set or remove an optional field."""
    same_presence = f"has(self.{field}) == has(oldSelf.{field})"
    return f"{same_presence} && (!has(self.{field}) || self.{field} == oldSelf.{field})"
