"""Every manifest in README.md and in the documentation fits the schema and the models; so does every part of one."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator
from pydantic import ValidationError

from support.documents import PAGES, ROOT, Block, blocks
from support.manifests import KINDS, SCHEMAS, DocumentError, resources

Json = dict[str, Any]
YAML = [block for block in blocks("yaml") if "samples.md" not in block.page]


def strict(schema: Json) -> Json:
    """The same, where an unknown field is an error and not dropped."""
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: strict(field) for name, field in schema["properties"].items()}
        found.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        found["items"] = strict(schema["items"])
    return found


VALIDATORS = {
    kind: Draft4Validator(strict(schema) | {"additionalProperties": True}) for kind, schema in SCHEMAS.items()
}


def problems(block: Block) -> list[str]:
    """What is wrong with the manifests of a block."""
    try:
        found = [*resources(block)]
    except (DocumentError, KeyError, yaml.YAMLError) as error:
        return [str(error)]
    return [problem for resource in found for problem in _problems(resource)]


def _problems(resource: Json) -> list[str]:
    kind = resource["kind"]
    wrong = [f"{error.json_path}: {error.message}" for error in VALIDATORS[kind].iter_errors(resource)]
    try:
        KINDS[kind].model_validate(resource)
    except ValidationError as error:
        wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_manifest_is_valid(block: Block) -> None:
    assert problems(block) == []


def test_there_are_manifests_of_all_kinds_and_parts_of_them() -> None:
    kinds = [resource["kind"] for block in YAML for resource in resources(block)]
    assert [kind for kind in KINDS if kinds.count(kind) < 2] == []


# A block of YAML that is wrong, its title, and a part of what is said.
BROKEN = {
    "a field that does not exist": (
        "FineTuneJob spec.training",
        "batchSise: 4",
        "'batchSise' was unexpected",
    ),
    "a field of a list": ("ModelPromotion spec", "gates: [{name: a, metrik: {}}]", "'metrik' was unexpected"),
    "a value that is none": ("FineTuneJob spec.distributed", "strategy: ZeRO3", "'ZeRO3' is not one of"),
    "a number out of its bounds": (
        "FineTuneJob spec.training",
        "learningRate: 0",
        "less than or equal to the minimum",
    ),
    "a part that does not exist": ("FineTuneJob spec.trainings", "epochs: 1", "trainings"),
    "no title": ("", "epochs: 1", "give it a title"),
    "a manifest of ours": (
        "",
        "{apiVersion: finetune.dev/v1alpha1, kind: ModelPromotion, metadata: {name: a}, spec: {model: m, alias: a}}",
        "'source' is a required property",
    ),
}


@pytest.mark.parametrize(("title", "text", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_found(title: str, text: str, said: str) -> None:
    found = problems(Block("docs/broken.md", 1, "yaml", title, text))
    assert any(said in problem for problem in found), found


def test_the_manifests_in_the_readme_are_the_shortest_samples() -> None:
    readme = next(page for page in PAGES if page.name == "README.md")
    samples = [
        ROOT / "crds/samples/gpu" / f"{name}.yaml" for name in ("support-chat", "promotion-support-chat")
    ]
    assert [yaml.safe_load(block.text) for block in readme.blocks("yaml")] == [
        yaml.safe_load(sample.read_text(encoding="utf-8")) for sample in samples
    ]
