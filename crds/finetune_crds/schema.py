"""Converts pydantic models to structural CRD schemas.

pydantic generates JSON Schema 2020-12. Structural schemas (Kubernetes API reference, CustomResourceDefinition) have no `$ref`,
no null unions and no `const`, and their exclusive bounds have the form of OpenAPI 3.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from finetune_crds.base import GROUP, REPLACED, REQUIRED_BY_RULE, VALIDATIONS, VERSION, ReplacedField, Rule
from finetune_crds.resources import Resource

Schema = dict[str, Any]
_AS_IN_SPEC = "As in the spec."
_INTERNAL_STATE = "Internal state of the operator"
# A reference to another field costs the reader a step, so it must be this much shorter than the description that it replaces.
_MIN_SAVED_CHARACTERS = 10
# Operators of CEL with the spaces around them; the first alternative skips literal texts.
_SPACED_OPERATOR = re.compile(r"('(?:[^'\\]|\\.)*')|\s*(\|\||&&|[=!<>]=|[<>+,])\s*")
# The space between two sentences. The dots of "e.g. " and "i.e. " end no sentence.
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s+")


def _collapse_optional(schema: Schema) -> Schema:
    """Replace `X | None` by X, without its default None: an optional field is a field that is not required."""
    choices = [choice for choice in schema.pop("anyOf", []) if choice.get("type") != "null"]
    if len(choices) == 1:
        only: Schema = choices[0]
        return only | {key: value for key, value in schema.items() if key != "default"}
    if choices:
        schema["anyOf"] = choices
    return schema


def _openapi_bounds(schema: Schema) -> Schema:
    """Write an exclusive bound as in OpenAPI 3.0: as a bound, and a flag that it is exclusive."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in schema:
            schema |= {bound: schema[exclusive], exclusive: True}
    return schema


def _is_nested_model(field: Schema) -> bool:
    """Whether a field is a nested model that cannot be null."""
    return "$ref" in field


def _with_default(field: Schema, *, nested_model: bool) -> Schema:
    """Return a field with its default.

    A nested model gets the defaults of its fields as its own default, so that the API server fills them in.

    CEL rules can then read `self.training.packing` without a check that `training` is set. Empty texts, lists and maps are no
    defaults.
    """
    if field.get("default") in ([], {}, "", None):
        field.pop("default", None)
    # Only the description names a default that the operator applies.
    if field.pop("x-operator-default", False):
        described_field = _describe_default(field)
        described_field.pop("default", None)
        return described_field
    # A nested model with required fields cannot have a default.
    if not nested_model or field.get("required"):
        return _describe_default(field)
    # NB: the API server checks this default against the rules before it fills in the defaults of nested fields, so this default must
    # contain the nested defaults.
    inner = {name: value["default"] for name, value in field["properties"].items() if "default" in value}
    return field | {"default": inner}


def _describe_default(field: Schema) -> Schema:
    """Return the field with its default in the description, since `kubectl explain` shows only descriptions."""
    text, default = field.get("description", ""), field.get("default")
    if default is None or "Default:" in text:
        return field
    value = str(default).lower() if isinstance(default, bool) else default
    value = ", ".join(str(item) for item in default) if isinstance(default, list) else value
    return field | {"description": f"{text} Default: {value}."}


def structural(schema: Schema, definitions: Schema | None = None) -> Schema:
    """Return the structural form of a JSON schema that pydantic generated."""
    definitions = definitions or schema.get("$defs", {})
    schema = {key: value for key, value in schema.items() if key not in ("title", "$defs")}
    if "$ref" in schema:
        _, _, model_name = schema.pop("$ref").rpartition("/")
        model = definitions[model_name]
        schema = {key: value for key, value in model.items() if key != "title"} | schema
    schema = _openapi_bounds(_collapse_optional(schema))
    # An optional model: its reference was a choice of `anyOf`.
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
            name: _with_default(
                structural(value, definitions), nested_model=_is_nested_model(value) and name not in required
            )
            for name, value in schema["properties"].items()
        }
    if "items" in schema:
        schema["items"] = _without_defaults(structural(schema["items"], definitions))
    return schema


def _with_replaced(schema: Schema) -> Schema:
    """Return the schema with the fields that it had in an earlier version, which the API server refuses."""
    schema = dict(schema)
    replaced_fields: dict[str, tuple[str, str, str]] = schema.pop(REPLACED, {})
    fields = {name: _build_refused_field(ReplacedField(*field)) for name, field in replaced_fields.items()}
    return schema | {"properties": schema["properties"] | fields}


def _without_required_by_rule(schema: Schema) -> Schema:
    """Remove from `required` the fields that a CEL rule requires instead."""
    remaining = {key: value for key, value in schema.items() if key != REQUIRED_BY_RULE}
    fields = schema.get(REQUIRED_BY_RULE, [])
    return remaining | (
        {"required": [name for name in schema["required"] if name not in fields]} if fields else {}
    )


def document_models(definitions: Schema) -> None:
    """Change the definitions of models for the documentation: remove fields of an earlier version, and complete `required`."""
    for definition in definitions.values():
        definition.pop(REPLACED, None)
        # Without this key, `structural` keeps every required field in `required`.
        definition.pop(REQUIRED_BY_RULE, None)


# Schemas of the fields of an earlier version, by the JSON type that the field had. NB: the API server checks types and unknown fields
# before rules. So a schema with another type, or an object's schema without the fields, would hide the message of the rule.
_ANY_OBJECT: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_REFUSED_SCHEMAS: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 16384},
    "array": {"type": "array", "maxItems": 64, "items": _ANY_OBJECT},
    "object": _ANY_OBJECT,
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "integer or string": {"x-kubernetes-int-or-string": True},
}


def _build_refused_field(field: ReplacedField) -> Schema:
    """Return the schema of a field that the API server refuses.

    NB: the rule is on the field itself, since the API server does not check the rules of a field that an update leaves unchanged. So
    an existing object that has the field can still be changed in other fields.
    """
    refusal: Schema = Rule("false", field.message).to_json()
    if field.kind == "object":
        # NB: the API server does not compare the unknown fields of an object, and considers it changed in every update. So the rule
        # itself accepts an unchanged object.
        refusal |= {"rule": "oldSelf.hasValue() && self == oldSelf.value()", "optionalOldSelf": True}
    return {**_REFUSED_SCHEMAS[field.kind], "description": field.description, VALIDATIONS: [refusal]}


def _without_defaults(schema: Schema) -> Schema:
    """Return the schema without defaults. The operator fills them in when it reads the object, and the descriptions still name them.

    NB: Argo CD compares a list as a whole. A default that the API server adds to an item is a difference from Git that no
    sync removes.
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


def _build_status_schema(
    schema: Schema, spec_descriptions: set[tuple[str, str, str]], parent: str = ""
) -> Schema:
    """Return a schema of the status without CEL rules: the operator writes only values that passed the rules in the spec.

    Args:
        schema: the schema of a field of the status.
        spec_descriptions: `_list_descriptions` of the spec. A field of the status with the same description does not repeat it.
        parent: the name of the field that has `schema`.
    """
    remaining = {key: value for key, value in schema.items() if key != VALIDATIONS}
    if isinstance(remaining.get("items"), dict):
        remaining["items"] = _build_status_schema(remaining["items"], spec_descriptions, parent)
    if "properties" in remaining:
        fields: Schema = {}
        for name, field in remaining["properties"].items():
            fields[name] = _build_status_schema(field, spec_descriptions, name)
            if (parent, name, field.get("description")) in spec_descriptions:
                fields[name]["description"] = _AS_IN_SPEC
        remaining["properties"] = fields
    return remaining


def compact_expression(expression: str) -> str:
    """Return a CEL expression without the spaces around its operators."""
    return _SPACED_OPERATOR.sub(lambda match: match[1] or match[2], expression)


def shorten_description(text: str) -> str:
    """Return the first sentence of a description, and the sentence that begins with `Default:`; the documentation has the whole text.

    kubectl apply keeps the CRD in an annotation of limited size.
    """
    first, *later_sentences = _SENTENCE_BREAK.split(text.strip())
    defaults = [sentence for sentence in later_sentences if sentence.startswith("Default:")]
    return " ".join(" ".join([first, *defaults]).split())


def _shorten_rule(rule: Schema) -> Schema:
    """Return a rule with compact expressions, and without the message if an expression builds it."""
    expressions = ("rule", "messageExpression")
    return {
        key: compact_expression(value) if key in expressions else value
        for key, value in rule.items()
        if key != "message" or "messageExpression" not in rule
    }


def _shorten(schema: Schema, *, is_internal: bool = False) -> Schema:
    """Return the schema of an object with short descriptions and compact rules at every level.

    Args:
        schema: the schema of an object, or of a part of one.
        is_internal: whether the object is internal state of the operator. Its fields have no descriptions.
    """
    shortened = dict(schema)
    if "description" in schema:
        description = schema["description"]
        if is_internal:
            del shortened["description"]
        else:
            shortened["description"] = shorten_description(description)
        is_internal = is_internal or description.startswith(_INTERNAL_STATE)
    if schema.get("minLength") == 1 and "pattern" in schema and not re.search(schema["pattern"], ""):
        # The pattern already refuses an empty text.
        del shortened["minLength"]
    if VALIDATIONS in schema:
        shortened[VALIDATIONS] = [_shorten_rule(rule) for rule in schema[VALIDATIONS]]
    if "properties" in schema:
        shortened["properties"] = {
            name: _shorten(field, is_internal=is_internal) for name, field in schema["properties"].items()
        }
    for nested in ("items", "additionalProperties"):
        if isinstance(schema.get(nested), dict):
            shortened[nested] = _shorten(schema[nested], is_internal=is_internal)
            # The list or the map has its own description.
            shortened[nested].pop("description", None)
    return shortened


def _refer_to_equal_descriptions(schema: Schema, path: str, places: dict[tuple[str, str], str]) -> Schema:
    """Return a schema in which a field refers to an earlier field with the same name and description, if that is much shorter.

    Args:
        schema: the schema of an object.
        path: the path of the object, as `kubectl explain` accepts it.
        places: the paths of earlier fields, by their names and descriptions. Fields of the schema are added.
    """
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {}
        for name, field in schema["properties"].items():
            field_path = f"{path}.{name}".lstrip(".")
            referring = _refer_to_equal_descriptions(field, field_path, places)
            description = field.get("description", "")
            place = places.setdefault((name, description), field_path)
            reference = f"As in {place.removeprefix('spec.')}."
            if place != field_path and len(reference) + _MIN_SAVED_CHARACTERS <= len(description):
                referring["description"] = reference
            result["properties"][name] = referring
    if isinstance(schema.get("items"), dict):
        result["items"] = _refer_to_equal_descriptions(schema["items"], path, places)
    return result


def _list_descriptions(schema: Schema, parent: str = "") -> Iterator[tuple[str, str, str]]:
    """Iterate over the fields below a schema: the name of the parent field, the name of the field, and its description."""
    for name, field in schema.get("properties", {}).items():
        yield parent, name, field.get("description", "")
        yield from _list_descriptions(field, name)
    if isinstance(schema.get("items"), dict):
        yield from _list_descriptions(schema["items"], parent)


def crd(
    resource: Resource,
    *,
    metadata_annotations: dict[str, str] | None = None,
    documented: bool = False,
) -> Schema:
    """Return the CustomResourceDefinition of a resource.

    Args:
        metadata_annotations: annotations of the definition.
        documented: whether the definition is for the documentation. It then omits the fields of an earlier version, repeats
            descriptions in the status, and lists all required fields in `required`.
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
        root = _shorten(root)
        properties = root["properties"]
        properties["status"] = _build_status_schema(
            properties["status"], {*_list_descriptions(properties["spec"])}
        )
        root = _refer_to_equal_descriptions(root, "", {})
    root["required"] = ["spec"]
    kind = resource.KIND
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.PLURAL}.{GROUP}",
            **({"annotations": metadata_annotations} if metadata_annotations else {}),
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
