"""Writes a registered version as one standalone folder, for the user's own evaluation command."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from finetune_trainer.evaluate import model
from finetune_trainer.examples.tokenizer import load_tokenizer, pad_id
from finetune_trainer.models import base_reference
from finetune_trainer.train.model.weights import load, merge, score_head

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe

# The folder for downloads, and the end of the name of an index of weights.
_WORK, _INDEX = ".fetched", ".index.json"


def write(recipe: Recipe, uri: str, folder: Path) -> None:
    """Write a model and its tokenizer as `save_pretrained` does, with an adapter merged into its base.

    Downloaded files are moved, not copied, since a volume does not always have room for two copies.

    Args:
        recipe: the recipe of the training.
        uri: the registered version.
        folder: the folder to write to; weights that an earlier attempt wrote there are removed.

    Raises:
        RecipeRefusedError: the version cannot be fetched, loaded or merged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    # NB: transformers prefers weights in one file to weights in several files, so it could load the file of an earlier attempt.
    for path in folder.iterdir():
        if base_reference.is_weights(path.name) or path.name.endswith(_INDEX):
            path.unlink()
    source = model.fetch_version(recipe, uri, work)
    spec = model.build_version_spec(recipe, uri)
    tokenizer = load_tokenizer(spec, source.tokenizer)
    if source.adapter is not None:
        merge.merge_into_base(source.base, source.adapter, spec, folder, model.VERSION)
    else:
        # Files outside the working folder are in the cache or on a volume, and must stay there.
        is_downloaded = source.base.is_relative_to(work)
        transfer = shutil.move if is_downloaded else shutil.copyfile
        for path in sorted(source.base.iterdir()):
            if path.is_file():
                transfer(path, folder / path.name)
    tokenizer.save_pretrained(folder)
    if load.read_task(spec, folder) == "RewardModel":
        score_head.write_padding(folder, pad_id(tokenizer))
    shutil.rmtree(work, ignore_errors=True)
    print(f"{uri} is in {folder}", flush=True)
