"""The model at output.uri: a folder that transformers, peft and inference servers load, and that model.base may name."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.models.output_folder import ModelFolder
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.train.delivery.export import ADAPTER, MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe

_BASE = "base"


def folder_of(recipe: Recipe) -> ModelFolder | None:
    """Return the folder of a job's model; None if the recipe has no output."""
    if recipe.output is None:
        return None
    return ModelFolder(recipe.output.uri, recipe.job, read_attempt())


def publish(output_folder: ModelFolder, exported: Path, recipe: Recipe, base: Origin | None) -> None:
    """Write a model to its folder: a standalone model, or an adapter that names its base.

    A base that was merged in this pod exists nowhere else: it is written to the folder `base` inside the adapter's folder.

    Args:
        output_folder: the folder.
        exported: what `export.write` wrote.
        recipe: the recipe.
        base: where the base was fetched from; None if it was merged in this pod.
    """
    if recipe.method.type == "Full" or recipe.method.export == "Merged":
        output_folder.publish({"": exported / MODEL})
        return
    # NB: a copy is changed, because `exported` also goes to the registry.
    adapter = exported.with_name(f"{exported.name}-adapter")
    shutil.copytree(exported / ADAPTER, adapter)
    # The folders to copy, by their path in the output folder.
    parts = {"": adapter}
    if base is None:
        # `export.write` has written the merged base to this folder, next to the adapter.
        parts[_BASE] = exported / MODEL
        base = Origin(f"{output_folder.uri}/{_BASE}", digest=base_reference.compute_digest(exported / MODEL))
        config = adapter / "adapter_config.json"
        adapter_config = {
            **json.loads(config.read_text(encoding="utf-8")),
            "base_model_name_or_path": base.uri,
        }
        config.write_text(json.dumps(adapter_config, indent=2) + "\n", encoding="utf-8")
    # If the base is external (`export.has_external_base`), `export.write` has written the reference.
    if base_reference.read_reference(adapter) is None:
        base_reference.write_reference(base, adapter)
    output_folder.publish(parts)
