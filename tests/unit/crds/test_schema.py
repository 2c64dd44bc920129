"""The CRD's schema is structural, bounded and described for every field of the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.__main__ import (
    DIGEST,
    chart_digests,
    chart_template,
    digest,
    main,
    manifest,
)
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.resources import RESOURCES, Resource
from finetune_crds.schema import compact_expression, crd, shorten_description, structural

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
SCHEMA: Json = crd(FineTuneJob)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every node of a schema, by its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(SCHEMA))
# Without the fields of an earlier version, which are refused.
KEPT = dict(nodes(crd(FineTuneJob, documented=True)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
SPEC = {path: node for path, node in NODES.items() if path.startswith(".spec")}
# The values of a sweep, which have the type of any field.
SWEPT_VALUE = ".spec.sweep.parameters[].values[]"
# What the API server itself describes or bounds.
OWN = {"", ".apiVersion", ".kind", ".metadata"}


def paths(wrong: Any, among: dict[str, Json] = NODES) -> list[str]:
    return [path for path, node in among.items() if wrong(node)]


def test_there_is_something_to_check() -> None:
    assert len(NODES) > 250
    assert {".spec.model.base", ".spec.pods.train.env[].name", ".status.conditions[].type"} <= NODES.keys()


def test_every_node_has_a_type() -> None:
    assert paths(lambda node: "type" not in node) == [SWEPT_VALUE]


@pytest.mark.parametrize(
    "keyword", ["$ref", "$defs", "anyOf", "oneOf", "allOf", "const", "title", "nullable", "uniqueItems"]
)
def test_no_node_uses_what_is_not_structural(keyword: str) -> None:
    # Required fields alone are structural.
    expected = [".spec.sweep.parameters[]"] if keyword == "oneOf" else []
    assert paths(lambda node: keyword in node) == expected


def test_exclusive_bounds_are_in_openapi_3_0_style() -> None:
    for keyword, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        assert (
            paths(lambda node, k=keyword, b=bound: k in node and (node[k] is not True or b not in node)) == []
        )


def test_no_map_is_closed_and_none_has_both_fields_and_keys() -> None:
    assert paths(lambda node: node.get("additionalProperties") is False) == []
    assert paths(lambda node: "additionalProperties" in node and "properties" in node) == []


def test_only_pod_templates_origins_of_variables_and_parameters_hold_unknown_fields() -> None:
    assert paths(lambda node: "x-kubernetes-preserve-unknown-fields" in node, KEPT) == [
        ".spec.trainer.parameters",
        ".spec.pods.all.env[].valueFrom",
        ".spec.pods.all.template",
        ".spec.pods.prepare.env[].valueFrom",
        ".spec.pods.prepare.template",
        ".spec.pods.train.env[].valueFrom",
        ".spec.pods.train.template",
        ".spec.pods.evaluate.env[].valueFrom",
        ".spec.pods.evaluate.template",
        ".spec.evaluation.parameters",
        SWEPT_VALUE,
    ]


@pytest.mark.parametrize("kind", RESOURCES)
def test_no_item_of_a_list_has_a_default(kind: Resource) -> None:
    """Argo CD compares a list as a whole: what the API server adds to an item stays out of sync."""
    schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert (
        paths(lambda node: "default" in node, {path: node for path, node in nodes(schema) if "[]" in path})
        == []
    )


def test_every_field_is_described() -> None:
    fields = {
        path: node for path, node in NODES.items() if path not in OWN and not path.endswith(("[]", "{}"))
    }
    assert paths(lambda node: not node.get("description"), fields) == []


def test_every_default_of_a_value_is_said_in_its_description() -> None:
    def hidden(node: Json) -> bool:
        default, description = node.get("default"), node.get("description", "")
        is_described = "Default:" in description or description.startswith("As in ")
        return default is not None and not isinstance(default, dict) and not is_described

    assert paths(hidden) == []


def test_what_a_command_of_an_evaluation_ignores_is_refused_beside_it_and_has_no_default() -> None:
    """The API server fills in defaults before it checks the rules."""
    rules = NODES[".spec.evaluation"]["x-kubernetes-validations"]
    [rule] = [
        item["rule"] for item in rules if "batchSize must not be set when command is set" in item["message"]
    ]
    for field in ("metrics", "baseModel", "limit", "generations", "maxNewTokens", "batchSize"):
        assert (f"has(self.{field})" in rule, "default" in NODES[f".spec.evaluation.{field}"]) == (
            True,
            False,
        )
        assert "Default:" in NODES[f".spec.evaluation.{field}"]["description"]


def test_every_string_list_and_map_of_the_spec_is_bounded() -> None:
    def unbounded(node: Json) -> bool:
        if node.get("type") == "string":
            return "maxLength" not in node and "enum" not in node
        if node.get("type") == "array":
            return "maxItems" not in node
        return "additionalProperties" in node and "maxProperties" not in node

    assert paths(unbounded, SPEC) == []


def test_every_required_field_exists() -> None:
    assert paths(lambda node: not set(node.get("required", [])) <= set(node.get("properties", {}))) == []


def test_several_writers_can_each_apply_their_items_of_a_list() -> None:
    """But for lists whose order counts."""
    lists = {path: node for path, node in SPEC.items() if node.get("type") == "array" and path in KEPT}
    merged = {
        path: node["x-kubernetes-list-type"]
        for path, node in lists.items()
        if "x-kubernetes-list-type" in node
    }
    assert {kind: [path for path in merged if merged[path] == kind] for kind in ("map", "set")} == {
        "map": [
            ".spec.data.source.sources",
            ".spec.data.prepare.decontaminate.sources",
            *(f".spec.pods.{role}.env" for role in ("all", "prepare", "train", "evaluate")),
            ".spec.tracking.sinks",
        ],
        "set": [
            ".spec.model.newTokens",
            ".spec.data.prepare.notNull",
            ".spec.data.prepare.languages",
            ".spec.data.prepare.redact",
            ".spec.data.prepare.decontaminate.sources[].columns",
            ".spec.data.prepare.dedupe.columns",
            ".spec.method.lora.targetModules",
            ".spec.method.lora.modulesToSave",
            ".spec.trainer.dependencies",
            ".spec.register.aliases",
            ".spec.evaluation.metrics",
            ".spec.sweep.rungs",
            ".spec.runPolicy.retryableExitCodes",
            ".spec.runPolicy.fatalExitCodes",
        ],
    }
    assert lists.keys() - merged.keys() == {
        *(f".spec.pods.{role}.envFrom" for role in ("all", "prepare", "train", "evaluate")),
        ".spec.trainer.command",
        ".spec.trainer.args",
        ".spec.evaluation.command",
        ".spec.evaluation.args",
        # Grid changes the last one fastest.
        ".spec.sweep.parameters",
        ".spec.sweep.parameters[].values",
    }


@pytest.mark.parametrize("kind", RESOURCES)
def test_no_resource_looks_seen_before_the_operator_has_seen_it(kind: Resource) -> None:
    """The kstatus library takes a resource without conditions for finished, unless its generation is another."""
    status = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert status["default"] == {"observedGeneration": -1}


def test_conditions_merge_by_their_type() -> None:
    node = NODES[".status.conditions"]
    kept = ("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "maxItems")
    assert [node[name] for name in kept] == ["map", ["type"], 16]


FORMS: dict[str, tuple[Json, Json]] = {
    "an optional value": (
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None, "description": "d"},
        {"type": "integer", "minimum": 1, "description": "d"},
    ),
    "a constant": ({"const": "a", "type": "string"}, {"enum": ["a"], "type": "string"}),
    "an exclusive bound": (
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "minimum": 0, "exclusiveMinimum": True},
    ),
    "a reference": (
        {
            "$ref": "#/$defs/Part",
            "description": "here",
            "$defs": {"Part": {"type": "object", "title": "Part"}},
        },
        {"type": "object", "description": "here"},
    ),
    "an optional reference": (
        {
            "anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}],
            "$defs": {"Part": {"type": "object", "description": "there"}},
        },
        {"type": "object", "description": "there"},
    ),
    "a free part": (
        {"type": "object", "additionalProperties": True, "x-kubernetes-preserve-unknown-fields": True},
        {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    ),
}


@pytest.mark.parametrize(("schema", "expected"), FORMS.values(), ids=FORMS)
def test_structural(schema: Json, expected: Json) -> None:
    assert structural(schema) == expected


DESCRIPTIONS: dict[str, tuple[str, str]] = {
    "one sentence": ("Name of the model.", "Name of the model."),
    "two sentences": ("Minimum score. Examples without a score are dropped.", "Minimum score."),
    "a default at the end": (
        "Shares. They add up. Default: 0.9, 0.05 and 0.05.",
        "Shares. Default: 0.9, 0.05 and 0.05.",
    ),
    "a default before the rest": ("Reuse. Default: Yes. Never: no reuse.", "Reuse. Default: Yes."),
    "numbers and addresses": (
        "At least 0.05, such as s3://bucket/v1.2/a.b or e.g. 17.3.x-scala2.13. More.",
        "At least 0.05, such as s3://bucket/v1.2/a.b or e.g. 17.3.x-scala2.13.",
    ),
    "another abbreviation": (
        "The last one, i.e. the newest, as in a Pod. More.",
        "The last one, i.e. the newest, as in a Pod.",
    ),
    "a field in lower case": ("Split. trainer.command can read all splits.", "Split."),
    "lines and paragraphs": (
        "Name of\nthe model.\n\nMore of it.\nDefault: the\nname.",
        "Name of the model. Default: the name.",
    ),
    "no text": ("", ""),
}


@pytest.mark.parametrize(("text", "short"), DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_a_short_description_is_the_first_sentence_and_the_default(text: str, short: str) -> None:
    assert shorten_description(text) == short


@pytest.mark.parametrize(
    ("expression", "compact"),
    [
        ("has(self.a) && self.b != 'x' || self.c <= 1.0", "has(self.a)&&self.b!='x'||self.c<=1.0"),
        ("self.a in ['x', 'y'] ? self.b : - 1", "self.a in ['x','y'] ? self.b : - 1"),
        ("'a == b, c && d' + self.a", "'a == b, c && d'+self.a"),
        (r"self.matches('it\'s == x') || self.b", r"self.matches('it\'s == x')||self.b"),
    ],
)
def test_a_compact_expression_keeps_its_literal_texts(expression: str, compact: str) -> None:
    assert compact_expression(expression) == compact


def test_the_documentation_keeps_whole_descriptions_and_rules() -> None:
    description = KEPT[".spec.trainer.dependencies"]["description"]
    assert (
        SPEC[".spec.trainer.dependencies"]["description"] == shorten_description(description) != description
    )
    rules = [node[".spec"]["x-kubernetes-validations"] for node in (KEPT, NODES)]
    assert [compact_expression(rule["rule"]) for rule in rules[0]] == [rule["rule"] for rule in rules[1]]


def test_a_description_refers_to_an_earlier_field_that_has_the_same_one() -> None:
    descriptions = {
        path.replace("[]", ""): node["description"]
        for path, node in NODES.items()
        if "description" in node and not path.endswith("[]")
    }
    assert descriptions[".spec.pods.train.envFrom"] == "As in pods.all.envFrom."
    assert descriptions[".spec.data.source.sources.path"] == "As in data.source.path."
    references = {
        path: description.removeprefix("As in ").removesuffix(".")
        for path, description in descriptions.items()
        if description.startswith("As in ") and description != "As in the spec."
    }
    for path, place in references.items():
        assert not descriptions[f".spec.{place}"].startswith("As in"), path


def test_fields_of_internal_state_have_no_description() -> None:
    promotion = dict(nodes(crd(ModelPromotion)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert promotion[".status.journal"]["description"] == "Internal state of the operator between two passes."
    inner = {
        node.get("description") for path, node in promotion.items() if path.startswith(".status.journal.")
    }
    assert inner == {None}


def test_an_error_that_an_expression_builds_has_no_second_message() -> None:
    rules = [rule for node in NODES.values() for rule in node.get("x-kubernetes-validations", [])]
    assert [rule for rule in rules if ("message" in rule) == ("messageExpression" in rule)] == []


def test_the_generated_files_are_fresh() -> None:
    folders = [str(ROOT / "crds" / "manifests"), str(ROOT / "charts" / "finetune-operator" / "templates")]
    assert main(["--check", *folders]) == 0


def test_a_stale_file_is_named_and_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"finetune.dev_{resource.PLURAL}.yaml" for resource in RESOURCES]
    assert main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "".join(f"{path} is stale: run `make generate`\n" for path in paths)
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    written = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    assert written == [crd(resource) for resource in RESOURCES]


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.KIND)
def test_the_manifest_is_small_enough_to_be_applied(resource: Resource) -> None:
    # kubectl apply keeps the whole of it as compact JSON in an annotation, and all annotations together may have 256 KiB.
    applied = json.dumps(yaml.safe_load(manifest(resource)), separators=(",", ":"))
    assert len(applied.encode()) < 160 * 1024
    assert applied.count('"rule":') < 300


def test_the_manifests_together_stay_small() -> None:
    # An installation with Helm keeps all of them in one Secret of at most 1 MiB, and the API server compiles every rule when it starts.
    sizes = [
        len(json.dumps(yaml.safe_load(manifest(resource)), separators=(",", ":")).encode())
        for resource in RESOURCES
    ]
    assert sum(sizes) < 208 * 1024


@pytest.mark.parametrize("kind", RESOURCES)
def test_the_status_has_no_rules_and_repeats_no_description_of_the_spec(kind: Resource) -> None:
    schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status = {path: node for path, node in nodes(schema) if path.startswith(".status")}
    assert paths(lambda node: "x-kubernetes-validations" in node, status) == []
    of_spec = dict(nodes(schema["properties"]["spec"]))
    for path, node in status.items():
        if node.get("description") == "As in the spec.":
            part, name = path.split(".")[-2:]
            assert [field for field in of_spec if field.endswith(f".{part}.{name}")], path


def test_the_documentation_has_all_that_the_status_repeats() -> None:
    documented = crd(FineTuneJob, documented=True)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    columns = [documented["properties"][root] for root in ("spec", "status")]
    of_spec, of_status = (dict(nodes(schema))[".data.columns"]["properties"]["text"] for schema in columns)
    assert of_spec == of_status


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.KIND)
def test_the_chart_may_leave_the_crd_out_and_keeps_it(resource: Resource) -> None:
    lines = chart_template(resource).splitlines()
    there = f'(include "finetune.crdIsThere" (dict "root" . "name" "{resource.PLURAL}.finetune.dev"))'
    assert (lines[1], lines[-1]) == (f"{{{{- if and .Values.crds.enabled (not {there}) }}}}", "{{- end }}")
    assert "    helm.sh/resource-policy: keep" in lines
    assert f"    {DIGEST}: {digest(resource)}" in lines
    assert f'{resource.PLURAL}.finetune.dev: "{digest(resource)}"' in chart_digests().splitlines()
