"""Fields of an earlier version: the API server refuses each and says what to write instead, as the upgrade guide does."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import REPLACED
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.promotions import promotion
from support.api import Api
from support.documents import Page
from support.refusals import refused

Json = dict[str, Any]
# The values of fields of an earlier version.
VALUES: dict[str, Any] = {
    "image": "mine:1",
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "s"}}],
    "serviceAccountName": "mine",
    "podTemplate": {"spec": {"containers": [{"name": "trainer", "tty": True}]}},
    "nccl": {"NCCL_DEBUG": "INFO"},
    "overlong": "Truncate",
    "unrenderable": "Drop",
    "endpoint": "support",
    "canary": {"steps": [{"percent": 5, "durationSeconds": 600}]},
    "previousPercent": 10,
    "version": "1",
    "by": "kim",
}


def prepared(**prepare: Any) -> Json:
    return {"data": {"source": {"type": "Parquet", "path": "/x"}, "prepare": {"output": "/y", **prepare}}}


def with_field(path: str) -> Json:
    """A resource with a field of an earlier version, and without the field that replaced it."""
    part, _, name = path.rpartition(".")
    field = {name: VALUES[name]}
    endpoint = {} if name == "endpoint" else {"endpoint": "support"}
    bodies: dict[str, Json] = {
        "": job(**field),
        "trainer": job(trainer=field),
        "distributed": job(distributed=field),
        "training": job(training=field),
        "evaluation": job(evaluation=field),
        "data.prepare": job(**prepared(**field)),
        "data.prepare.spark": job(**prepared(spark=field)),
        "approval": promotion(approval=field),
        "serving.databricks": promotion(serving={"type": "Databricks", **endpoint, "databricks": field}),
    }
    return bodies[part]


def replacements() -> dict[str, str | None]:
    """What the upgrade guide says to write, by the path of the field that went; None where nothing replaces it."""
    text = Page("docs/operations/upgrade.md").text.partition("## Replaced fields")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): _first_code(cells[1]) for cells in rows}


def _first_code(cell: str) -> str | None:
    return None if cell.startswith("None") else cell.split("`")[1]


@pytest.mark.parametrize(("path", "new"), replacements().items())
def test_a_field_of_an_earlier_version_is_refused_with_what_to_write(
    api: Api, path: str, new: str | None
) -> None:
    with refused(f"spec.{path}: Invalid value: replaced by {new}" if new else ": removed: "):
        dry_run.create(api, with_field(path))


def test_the_upgrade_guide_has_every_field_that_is_refused() -> None:
    definitions = [
        definition
        for resource in (FineTuneJob, ModelPromotion)
        for definition in resource.model_json_schema()["$defs"].values()
    ]
    replaced_paths = {
        path for definition in definitions for _, path, _ in definition.get(REPLACED, {}).values()
    }
    assert replaced_paths == replacements().keys()
