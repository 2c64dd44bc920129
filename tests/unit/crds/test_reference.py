"""The reference pages: what a row says of a field, and that each field and each sample has its place."""

from __future__ import annotations

import re
from enum import StrEnum

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.reference import (
    SAMPLES,
    anchor,
    attribute_docs,
    condition_reference,
    field_reference,
    pages,
    sample_files,
)
from finetune_crds.schema import crd

JOB, PROMOTION = field_reference(FineTuneJob), field_reference(ModelPromotion)


@pytest.mark.parametrize(
    ("page", "section", "field", "kind"),
    [
        (JOB, "spec.model", "base", "string"),
        (JOB, "spec.pods.all", "template", "object"),
        (JOB, "spec.training", "perDeviceBatchSize", "integer of at least 1"),
        (JOB, "spec.training", "learningRate", "number above 0, up to 10"),
        (JOB, "spec.training.optimizer", "beta1", "number of at least 0, below 1"),
        (JOB, "spec.distributed", "port", "integer from 1,024 to 65,535"),
        (JOB, "spec.distributed", "strategy", "`FSDP` or `HSDP` or `DDP`"),
        (JOB, "spec.runPolicy", "fatalExitCodes", "list of integer from 1 to 255"),
        (JOB, "spec.trainer", "parameters", "object"),
        (JOB, "spec.tracking", "tags", "map of string"),
        (JOB, "spec.data", "source", "[object](#specdatasource)"),
        (JOB, "RolePodSettings", "env", "list of [object](#envvar)"),
        (PROMOTION, "spec.source", "version", "integer or string"),
        (PROMOTION, "spec.serving.canary", "gates", "list of [object](#specservingcanarygates)"),
        (JOB, "spec.tracking", "secretRef", "[object](#localreference)"),
        (JOB, "spec.trainer.code", "configMapRef", "[object](#localreference)"),
        (JOB, "EnvFromSource", "secretRef", "[object](#localreference)"),
        (JOB, "status.resolved", "checkpoint", "[object](#speccheckpoint)"),
        (PROMOTION, "spec.tracking", "secretRef", "[object](#localreference)"),
    ],
)
def test_a_type(page: str, section: str, field: str, kind: str) -> None:
    chapter = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"^\| `{field}` \| (.+?) \| ", chapter, re.MULTILINE)
    assert found
    assert found[1] == kind


def test_what_stands_in_several_places_is_described_for_all_of_them() -> None:
    for page in (JOB, PROMOTION):
        assert page.count("\n## LocalReference\n\nA Secret or ConfigMap of the same namespace.\n") == 1


def test_every_link_has_its_section_and_every_section_stands_once() -> None:
    for page in (JOB, PROMOTION):
        headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert len({*headings}) == len(headings)
        assert {*re.findall(r"\[object\]\(#([^)]+)\)", page)} <= {anchor(heading) for heading in headings}


def test_what_is_required_says_so() -> None:
    required = re.findall(
        r"^\| `(\w+)` \| .+? \| \*\*Required", PROMOTION.partition("\n## spec.source")[0], re.MULTILINE
    )
    assert required == ["alias", "source"]


def test_the_rule_of_immutable_fields_names_them_all() -> None:
    said = [line for line in PROMOTION.splitlines() if "cannot change" in line]
    assert said == [
        "- model, alias, tracking.uri and tracking.registryUri cannot change: create a ModelPromotion with another name, and "
        "delete this one"
    ]


def test_a_field_that_a_rule_requires_is_marked_as_required() -> None:
    assert "| `endpoint` | string | **Required.** Name of the endpoint. |" in PROMOTION
    schema = crd(ModelPromotion)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema["properties"]["spec"]["properties"]["serving"]["required"] == ["type"]


def test_every_condition_and_reason_is_there() -> None:
    page = condition_reference()
    assert [name for name in ConditionType if f"| [{name}](" not in page] == []
    assert [name for name in ConditionReason if f"`{name}`" not in page] == []


class Color(StrEnum):
    """A color."""

    RED = "Red"
    """Like blood."""
    GREEN = "Green"


def test_docstrings_of_members() -> None:
    assert attribute_docs(Color) == {"Red": "Like blood."}


def test_every_sample_is_there_as_it_stands() -> None:
    page = pages()["samples.md"]
    missing = [
        path.stem
        for path in SAMPLES.rglob("*.yaml")
        if (f"\n## {path.stem}\n" in page) == (path.name == "kustomization.yaml")
    ]
    assert missing == []
    assert "kubectl patch ftj suspended" in page


def test_the_readme_of_the_samples_says_once_what_each_is_for() -> None:
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(([\w/-]+\.yaml)\) \| [^|]+ \| [^|]+ \|$",
        (SAMPLES / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    files = sorted(path.relative_to(SAMPLES).as_posix() for path in sample_files())
    assert sorted(file for _, file in rows) == files
    assert [name for name, file in rows if f"/{file}".rpartition("/")[2] != f"{name}.yaml"] == []


def test_the_page_of_the_samples_begins_with_what_each_is_for() -> None:
    page = pages()["samples.md"]
    table = page.partition("\n## ")[0]
    assert [path.stem for path in sample_files() if f"| [{path.stem}](#{path.stem}) | " not in table] == []
