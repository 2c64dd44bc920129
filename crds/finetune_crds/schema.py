"""pydantic models -> structural CRD schemas.

Structural schemas (Kubernetes API reference, CustomResourceDefinition) know no `$ref`, no null unions, no
`const`, and exclusive bounds in OpenAPI 3.0 style; pydantic writes JSON Schema 2020-12.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from finetune_crds.base import BY_RULE, GROUP, REPLACED, VALIDATIONS, VERSION, Rule
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion

Schema = dict[str, Any]
_AS_IN_SPEC = "As in the spec."


def _collapse_optional(schema: Schema) -> Schema:
    """`X | None` becomes X: a field that may be absent is simply not required."""
    choices = [choice for choice in schema.pop("anyOf", []) if choice.get("type") != "null"]
    if len(choices) == 1:
        only: Schema = choices[0]
        return only | {key: value for key, value in schema.items() if key != "default"}
    return schema | ({"anyOf": choices} if choices else {})


def _openapi_bounds(schema: Schema) -> Schema:
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in schema:
            schema |= {bound: schema[exclusive], exclusive: True}
    return schema


def _is_part(field: Schema) -> bool:
    """Whether a field holds another model and may not be null."""
    return "$ref" in field


def _with_default(field: Schema, *, part: bool) -> Schema:
    """A part whose fields all have defaults gets them as its own default, so that the API server fills them in.

    CEL rules can then read `self.training.packing` without asking whether the part is there. Empty lists and
    maps stay absent.
    """
    if field.get("default") in ([], {}, "", None):
        field.pop("default", None)
    if field.pop("x-late-default", False):
        described_field = _say_default(field)
        described_field.pop("default", None)
        return described_field
    if not part or field.get("required"):
        return _say_default(field)
    # NB: the API server checks a default against the rules as it is written, before it fills in the inner ones.
    inner = {name: value["default"] for name, value in field["properties"].items() if "default" in value}
    return field | {"default": inner}


def _say_default(field: Schema) -> Schema:
    """`kubectl explain` shows descriptions only, so they name the default."""
    text, default = field.get("description", ""), field.get("default")
    if default is None or "Default:" in text:
        return field
    shown = str(default).lower() if isinstance(default, bool) else default
    shown = ", ".join(str(item) for item in default) if isinstance(default, list) else shown
    return field | {"description": f"{text} Default: {shown}."}


def structural(schema: Schema, definitions: Schema | None = None) -> Schema:
    """The structural form of a JSON schema that pydantic generated."""
    definitions = definitions or schema.get("$defs", {})
    schema = {key: value for key, value in schema.items() if key not in ("title", "$defs")}
    if "$ref" in schema:
        target = definitions[schema.pop("$ref").rsplit("/", 1)[1]]
        schema = {key: value for key, value in target.items() if key != "title"} | schema
    schema = _openapi_bounds(_collapse_optional(schema))
    if "$ref" in schema:
        return structural(schema, definitions)
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.pop("additionalProperties", None)
    if isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    if "properties" in schema:
        schema = _without_required_by_rule(_with_replaced(schema))
        required = schema.get("required", [])
        schema["properties"] = {
            name: _with_default(structural(value, definitions), part=_is_part(value) and name not in required)
            for name, value in schema["properties"].items()
        }
    if "items" in schema:
        schema["items"] = _without_defaults(structural(schema["items"], definitions))
    return schema


def _with_replaced(schema: Schema) -> Schema:
    """The schema with the fields that it had in an earlier version, each of which is refused."""
    schema = dict(schema)
    replaced: dict[str, tuple[str, str]] = schema.pop(REPLACED, {})
    fields = {name: _refused_field(kind, message) for name, (kind, message) in replaced.items()}
    return schema | {"properties": schema["properties"] | fields}


def _without_required_by_rule(schema: Schema) -> Schema:
    """The schema without the required fields that a rule requires."""
    remaining = {key: value for key, value in schema.items() if key != BY_RULE}
    fields = schema.get(BY_RULE, [])
    return remaining | (
        {"required": [name for name in schema["required"] if name not in fields]} if fields else {}
    )


def document_models(definitions: Schema) -> None:
    """Change the definitions of models for the documentation: no field of an earlier version, and each required field as such."""
    for definition in definitions.values():
        definition.pop(REPLACED, None)
        definition.pop(BY_RULE, None)


# NB: the API server looks for unknown fields before it reads rules, so an object may hold any; and it reads the types before that,
# so each is that of the earlier version.
_ANY_OBJECT: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_REFUSED: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 16384},
    "array": {"type": "array", "maxItems": 64, "items": _ANY_OBJECT},
    "object": _ANY_OBJECT,
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
}


def _refused_field(kind: str, message: str) -> Schema:
    """A field that is refused. NB: the rule is on the field itself, so an object that has it already can be changed elsewhere."""
    refusal: Schema = Rule("false", message).to_json()
    if kind == "object":
        # NB: the API server compares no fields that it does not know, so it takes every object of them for a changed one.
        refusal |= {"rule": "oldSelf.hasValue() && self == oldSelf.value()", "optionalOldSelf": True}
    replacement = message.partition(" was ")[2]
    description = f"{replacement[:1].upper()}{replacement[1:]}."
    return {**_REFUSED[kind], "description": description, VALIDATIONS: [refusal]}


def _without_defaults(schema: Schema) -> Schema:
    """The schema without defaults, which the reader fills in; the descriptions still name them.

    NB: Argo CD compares a list as a whole, so one default that the API server puts into an item of it is a difference
    from Git that no sync removes.
    """
    remaining = {key: value for key, value in schema.items() if key != "default"}
    for nested in ("items", "additionalProperties"):
        if isinstance(remaining.get(nested), dict):
            remaining[nested] = _without_defaults(remaining[nested])
    if "properties" in remaining:
        remaining["properties"] = {
            name: _without_defaults(field) for name, field in remaining["properties"].items()
        }
    return remaining


def _reported(schema: Schema, of_spec: set[tuple[str, str, str]], part: str = "") -> Schema:
    """A schema of the status without CEL rules: the operator writes it, from values that met them in the spec.

    Args:
        of_spec: `_descriptions` of the spec, which the same fields of the status need not repeat.
        part: the field that has the schema.
    """
    remaining = {key: value for key, value in schema.items() if key != VALIDATIONS}
    if isinstance(remaining.get("items"), dict):
        remaining["items"] = _reported(remaining["items"], of_spec, part)
    if "properties" in remaining:
        remaining["properties"] = {
            name: _reported(field, of_spec, name)
            | ({"description": _AS_IN_SPEC} if (part, name, field.get("description")) in of_spec else {})
            for name, field in remaining["properties"].items()
        }
    return remaining


def _descriptions(schema: Schema, part: str = "") -> Iterator[tuple[str, str, str]]:
    """The fields below a schema: the field that has each of them, its name and its description."""
    for name, field in schema.get("properties", {}).items():
        yield part, name, field.get("description", "")
        yield from _descriptions(field, name)
    if isinstance(schema.get("items"), dict):
        yield from _descriptions(schema["items"], part)


def crd(
    resource: type[FineTuneJob | ModelPromotion],
    *,
    annotations: dict[str, str] | None = None,
    documented: bool = False,
) -> Schema:
    """The CustomResourceDefinition of a resource.

    Args:
        annotations: annotations of the definition.
        documented: whether it is for the documentation: without the fields of an earlier version, which the API server refuses, with
            all that the status repeats from the spec, and with `required` as the models have it.
    """
    generated = resource.model_json_schema(by_alias=True, mode="validation")
    if documented:
        document_models(generated["$defs"])
    root = structural(generated)
    properties = root["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    properties["metadata"] = {"type": "object"}
    if not documented:
        properties["status"] = _reported(properties["status"], {*_descriptions(properties["spec"])})
    root["required"] = ["spec"]
    kind = resource.KIND
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.PLURAL}.{GROUP}",
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": resource.PLURAL,
                "singular": kind.lower(),
                "shortNames": resource.SHORT_NAMES,
                "categories": ["finetune"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": resource.COLUMNS,
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }
