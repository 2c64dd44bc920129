"""Fields that spec.pods replaces: the API server refuses each and names the field to write instead, as the upgrade guide does."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import REPLACED
from finetune_crds.finetunejob import FineTuneJob
from integration.schema import dry_run
from support.api import Api
from support.documents import Page
from support.refusals import refused
from worlds.processes.jobs import job

Json = dict[str, Any]
# The values of fields of an earlier version.
VALUES: dict[str, Any] = {
    "image": "mine:1",
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "s"}}],
    "serviceAccountName": "mine",
    "podTemplate": {"spec": {"containers": [{"name": "trainer", "tty": True}]}},
}


def prepared(**prepare: Any) -> Json:
    return {"data": {"source": {"type": "Parquet", "path": "/x"}, "prepare": {"output": "/y", **prepare}}}


def with_field(path: str) -> Json:
    """A job with a field of an earlier version."""
    part, _, name = path.rpartition(".")
    field = {name: VALUES[name]}
    parts: dict[str, Json] = {
        "": field,
        "trainer": {"trainer": field},
        "evaluation": {"evaluation": field},
        "data.prepare": prepared(**field),
        "data.prepare.spark": prepared(spark=field),
    }
    return job(**parts[part])


def replacements() -> dict[str, str]:
    """What the upgrade guide says to write, by the path of the field that went."""
    text = Page("docs/operations/upgrade.md").text.partition("## Replaced fields")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1].split("`")[1] for cells in rows}


@pytest.mark.parametrize(("path", "new"), replacements().items())
def test_a_replaced_field_is_refused_with_the_one_to_write(api: Api, path: str, new: str) -> None:
    with refused(f"{path} was replaced by {new}"):
        dry_run.create(api, with_field(path))


def test_the_upgrade_guide_has_every_replaced_field() -> None:
    definitions = FineTuneJob.model_json_schema()["$defs"].values()
    messages = [message for found in definitions for _, message in found.get(REPLACED, {}).values()]
    assert {message.partition(" was replaced")[0] for message in messages} == replacements().keys()
