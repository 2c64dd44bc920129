"""The chart's values: each has its place in the schema, and what jobs get by default is checked strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from finetune_crds.env import RESERVED_ENV
from support.documents import Block, blocks
from support.manifests import VALUES as TITLE

Json = dict[str, Any]
CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
# What is passed on as it is: the API server checks it.
FREE = {
    "podSecurityContext",
    "securityContext",
    *(f"{path}resources.{part}" for path in ("", "mlflow.") for part in ("requests", "limits")),
}


def paths(value: Json, path: str = "") -> Iterator[str]:
    """The path of every object of the values that has values of its own."""
    for name, inner in value.items():
        if isinstance(inner, dict) and inner and f"{path}{name}" not in FREE:
            yield f"{path}{name}"
            yield from paths(inner, f"{path}{name}.")


def nested(path: str, leaf: Any) -> Json:
    """Values with one leaf."""
    for name in reversed(path.split(".")):
        leaf = {name: leaf}
    return dict(leaf)


def errors(values: Json) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(values)]


def test_the_values_fit_the_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert errors(VALUES) == []


@pytest.mark.parametrize("path", ["", *(path for path in paths(VALUES) if path != "global")])
def test_a_value_that_there_is_not_is_refused(path: str) -> None:
    values = nested(f"{path}.unknown".lstrip("."), 1)
    assert any("unknown" in message for message in errors(values))


@pytest.mark.parametrize("block", [item for item in blocks("yaml") if item.title == TITLE], ids=str)
def test_values_in_the_documentation_fit_the_schema(block: Block) -> None:
    assert errors(yaml.safe_load(block.text)) == []


def test_every_value_of_the_schema_has_a_default() -> None:
    top = SCHEMA["properties"]
    inner = {
        f"{name}.{field}"
        for name, part in top.items()
        for field in part.get("properties", {})
        if field not in VALUES.get(name, {})
    }
    assert (top.keys() ^ VALUES.keys(), inner) == (set(), set())


def test_jobs_cannot_get_variables_that_the_operator_sets() -> None:
    refused = [
        name for name in RESERVED_ENV if errors(nested("defaults.env", [{"name": name, "value": "1"}]))
    ]
    assert refused == [*RESERVED_ENV]
    assert errors(nested("defaults.env", [{"name": "HF_HOME", "value": "/models"}])) == []


DEFAULTS: dict[str, tuple[Json, bool]] = {
    "all of them": (
        {
            "storage": "s3://bucket/finetune",
            "env": [
                {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            ],
            "envFrom": [{"secretRef": {"name": "s3"}}, {"configMapRef": {"name": "more", "optional": True}}],
            "podTemplate": {"metadata": {"labels": {"team": "ml"}}, "spec": {"priorityClassName": "low"}},
            "queueName": "gpus",
            "serviceAccountName": "trainer",
            "modelCache": {"claimName": "models"},
            "checkpoint": {"everySteps": 100, "keep": 3, "mode": "Sync"},
            "imagePullSecrets": [{"name": "registry"}],
        },
        True,
    ),
    "a volume as storage": ({"storage": "/data"}, True),
    "a storage that is none": ({"storage": "bucket/finetune"}, False),
    "a variable with two origins": ({"env": [{"name": "A", "value": "1", "valueFrom": {}}]}, False),
    "a source that is none": ({"envFrom": [{"prefix": "A_"}]}, False),
    "two sources in one": (
        {"envFrom": [{"secretRef": {"name": "a"}, "configMapRef": {"name": "a"}}]},
        False,
    ),
    "a Secret without a name": ({"envFrom": [{"secretRef": {"name": " "}}]}, False),
    "a queue that is no label": ({"queueName": "a b"}, False),
    "a mode of other spelling": ({"checkpoint": {"mode": "async"}}, False),
    "a pod template with a field beside its spec": ({"podTemplate": {"containers": []}}, False),
    "a pull secret as a word": ({"imagePullSecrets": ["registry"]}, False),
}


@pytest.mark.parametrize(("defaults", "fit"), DEFAULTS.values(), ids=DEFAULTS)
def test_defaults_of_jobs(defaults: Json, fit: bool) -> None:
    assert (errors({"defaults": defaults}) == []) is fit
