"""The rules of the API, evaluated on recipes that no API server has checked: recipes on a laptop, and recipes completed with detected columns.

The rules are the CEL expressions of the CustomResourceDefinition, so that each is written once. A pod of the operator does not check its
recipe again: a newer image may have rules that the job, which the API server accepted before, does not meet.
"""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel

from finetune_crds.base import VALIDATIONS, Json
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.schema import Schema, crd
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.recipe import Recipe

# Fields of a recipe that FineTuneJob.spec does not have.
_NOT_IN_SPEC = {"kind", "job", "prepared", "parameters"}
_OLD_SELF = "oldSelf"
# Kinds of nodes in celpy's grammar, one for each level of precedence: a node of such a kind with only one child has the value of the child.
_LEVELS = {
    "expr",
    "conditionalor",
    "conditionaland",
    "relation",
    "addition",
    "multiplication",
    "unary",
    "member",
}


def check(recipe: Recipe) -> None:
    """Check the rules of FineTuneJob.spec on a recipe.

    Raises:
        RecipeRefusedError: the recipe violates rules; the message contains the sentence and the field of each.
    """
    violations = find_violations_of_recipe(recipe)
    if violations:
        raise RecipeRefusedError("; ".join(violations))


def check_columns(recipe: Recipe, complete_recipe: Recipe) -> None:
    """Check a recipe whose columns were found in the data: only the rules that these columns violate are reported.

    Args:
        recipe: the recipe, which names no columns.
        complete_recipe: the same recipe with the columns.

    Raises:
        RecipeRefusedError: the columns conflict with other fields.
    """
    violations_without_columns = find_violations_of_recipe(recipe)
    violations = [
        sentence
        for sentence in find_violations_of_recipe(complete_recipe)
        if sentence not in violations_without_columns
    ]
    columns = complete_recipe.data.columns
    # A complete recipe always has columns.
    if violations and columns is not None:
        raise RecipeRefusedError(f"{'; '.join(violations)}; the data has columns of type {columns.type}")


def find_violations_of_recipe(recipe: Recipe) -> list[str]:
    """Return the sentences of the rules that a recipe violates, each after the field that is at fault."""
    schema = _load_spec_schema()
    return [*find_violations(schema, set_defaults(schema, _build_spec(recipe, schema)))]


def find_violations(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """Yield the sentences of the rules of a schema that a new object violates, in the words of the API server.

    A sentence that does not begin with the field is prefixed with it.

    Args:
        schema: of a CustomResourceDefinition, or a part of one.
        value: the object as JSON, with its defaults.
        path: where the object is, such as `.spec`.
    """
    yield from _find_violations(schema, _convert(schema, value), path)


def set_defaults(schema: Schema, value: Any) -> Any:
    """Return an object with the defaults of its schema, as the API server completes it."""
    if isinstance(value, dict):
        fields: Schema = schema.get("properties", {})
        defaults = {
            name: copy.deepcopy(field["default"])
            for name, field in fields.items()
            if name not in value and "default" in field
        }
        return {
            name: set_defaults(fields.get(name) or {}, part) for name, part in {**value, **defaults}.items()
        }
    if isinstance(value, list):
        return [set_defaults(schema.get("items") or {}, item) for item in value]
    return value


def _build_spec(recipe: Recipe, schema: Schema) -> Json:
    """Return the spec that has this recipe, with only the fields that differ from their defaults."""
    spec: Json = recipe.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, exclude=_NOT_IN_SPEC
    )
    if recipe.data.source is not None:
        # The spec has no splits: the operator adds the splits that the job prepared.
        spec["data"].pop("splits", None)
    # `exclude_defaults` may have dropped learningRate. Its default in the API depends on the method, so the spec must contain the value.
    spec["training"] = {**spec.get("training", {}), "learningRate": recipe.training.learning_rate}
    without_empty: Json = _drop_empty(schema, spec)
    return without_empty


def _drop_empty(schema: Schema, value: Any) -> Any:
    """Return a value without empty lists and maps, as in a spec that omits them. An object of the schema is kept even without fields."""
    if isinstance(value, list):
        return [_drop_empty(schema.get("items") or {}, item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields: Schema = schema["properties"]

    def is_omitted(name: str, part: Any) -> bool:
        is_map = "properties" not in (fields.get(name) or {})
        return part == [] or (part == {} and is_map)

    return {
        name: _drop_empty(fields.get(name) or {}, part)
        for name, part in value.items()
        if not is_omitted(name, part)
    }


def _find_violations(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Yield the sentences as `find_violations` does; the value has the types of CEL."""
    for rule in schema.get(VALIDATIONS, ()):
        if _is_transition(rule) or _evaluate(rule["rule"], value):
            continue
        field = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
        has_expression = "messageExpression" in rule
        message = str(_evaluate(rule["messageExpression"], value) if has_expression else rule["message"])
        yield message if message.startswith(field) else f"{field}: {message}"
    if isinstance(value, celtypes.MapType):
        for key, part in value.items():
            name = str(key)
            yield from _find_violations(_find_field_schema(schema, name), part, f"{path}.{name}")
    elif isinstance(value, celtypes.ListType):
        for number, item in enumerate(value):
            yield from _find_violations(schema.get("items") or {}, item, f"{path}[{number}]")


def _find_field_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of a field of an object, or of a value of a map; empty for a field that the schema does not describe."""
    value_schema = schema.get("additionalProperties")
    field_schema: Schema = schema.get("properties", {}).get(
        name, value_schema if isinstance(value_schema, dict) else {}
    )
    return field_schema


def _is_transition(rule: Schema) -> bool:
    """Whether a rule applies only to updates: it compares an object with the object that it replaces, and does not make oldSelf optional."""
    return _OLD_SELF in rule["rule"] and not rule.get("optionalOldSelf", False)


def _convert(schema: Schema, value: Any) -> Any:
    """Return a JSON value with the types of CEL: a number of the schema is a double, even if it is written without decimals."""
    if isinstance(value, dict):
        return celtypes.MapType(
            {
                celtypes.StringType(name): _convert(_find_field_schema(schema, name), part)
                for name, part in value.items()
            }
        )
    if isinstance(value, list):
        return celtypes.ListType([_convert(schema.get("items") or {}, item) for item in value])
    return json_to_cel(float(value) if schema.get("type") == "number" else value)


def _evaluate(expression: str, value: Any) -> Any:
    # No rule reads this oldSelf, see `_FUNCTIONS`, but CEL requires a value.
    return compile_rule(expression).evaluate({"self": value, _OLD_SELF: celtypes.BoolType(False)})


@cache
def compile_rule(expression: str) -> celpy.Runner:
    """Compile a CEL expression.

    Raises:
        celpy.CELParseError: the library cannot read it.
    """
    environment = celpy.Environment()
    return environment.program(_shorten(environment.compile(expression)), functions=_FUNCTIONS)


def _shorten(node: Any) -> Any:
    """Return a syntax tree without the levels that have only one child. The grammar puts eight above each name, which slows evaluation."""
    if not isinstance(node, celpy.Expression):
        return node
    children = [_shorten(child) for child in node.children]
    if node.data in _LEVELS and len(children) == 1:
        return children[0]
    return celpy.Expression(node.data, children, node.meta)


def _is_sorted(items: Any) -> celtypes.BoolType:
    return celtypes.BoolType(all(first <= second for first, second in itertools.pairwise(items)))


# Functions of the API server that the library does not have. NB: a new object has no oldSelf, so `hasValue` is false.
_FUNCTIONS: dict[str, Any] = {
    "hasValue": lambda _old_self: celtypes.BoolType(False),
    "value": lambda old_self: old_self,
    "isSorted": _is_sorted,
}


@cache
def _load_spec_schema() -> Schema:
    """Return the schema of FineTuneJob.spec, without fields of earlier versions, which a recipe cannot have."""
    version = crd(FineTuneJob, documented=True)["spec"]["versions"][0]
    schema: Schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema
