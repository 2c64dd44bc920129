"""What a folder of output.uri holds, by what the job exports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.recipe import Recipe
from finetune_trainer.models import base_reference, download
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.train.delivery import output

if TYPE_CHECKING:
    from pathlib import Path

BASE = {"config.json": "{}", "model.safetensors": "weights"}
ADAPTER = {"adapter_config.json": '{"base_model_name_or_path": null}', "adapter_model.safetensors": "adapter"}


def exported(folder: Path, parts: dict[str, dict[str, str]]) -> Path:
    for part, files in parts.items():
        (folder / part).mkdir(parents=True)
        for name, content in files.items():
            (folder / part / name).write_text(content)
    return folder


def published(tmp_path: Path, method: dict[str, Any], export: Path, base: Origin | None) -> Path:
    recipe = Recipe.model_validate(
        {
            "job": {"name": "tiny", "namespace": "tests", "uid": "0001"},
            "model": {"base": "org/base"},
            "data": {"splits": {"type": "Delta", "path": "/splits"}},
            "method": method,
            "output": {"uri": str(tmp_path / "output")},
        }
    )
    to = output.folder_of(recipe)
    assert to is not None
    to.claim()
    output.publish(to, export, recipe, base)
    return tmp_path / "output"


@pytest.mark.parametrize("method", [{"type": "Full"}, {"type": "LoRA", "export": "Merged"}], ids=str)
def test_a_standalone_model(tmp_path: Path, method: dict[str, Any]) -> None:
    export = exported(tmp_path / "export", {"model": BASE, "peft": ADAPTER})
    model_folder = published(tmp_path, method, export, Origin("org/base", "c0ffee"))
    assert sorted(path.name for path in model_folder.iterdir()) == sorted([*BASE, "finetune_model.json"])


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    base = Origin("org/base", "c0ffee")
    model_folder = published(
        tmp_path, {"type": "LoRA"}, exported(tmp_path / "export", {"peft": ADAPTER}), base
    )
    assert base_reference.read_reference(model_folder) == base


def test_the_base_of_an_adapter_that_lies_nowhere_else_is_beside_it(tmp_path: Path) -> None:
    export = exported(tmp_path / "export", {"model": BASE, "peft": ADAPTER})
    model_folder = published(tmp_path, {"type": "LoRA"}, export, None)
    fetched = download.fetch(str(model_folder), tmp_path / "to")
    assert (fetched.base, fetched.adapter) == (model_folder / "base", model_folder)
    assert json.loads((model_folder / "adapter_config.json").read_text()) == {
        "base_model_name_or_path": f"{model_folder}/base"
    }
    # What goes to the registry stays as it was.
    assert (export / "peft" / "adapter_config.json").read_text() == ADAPTER["adapter_config.json"]
