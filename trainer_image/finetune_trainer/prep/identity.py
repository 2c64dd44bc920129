"""The digest of a preparation and of what it read: equal digests mean equal rows."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from finetune_crds.preparation import digest_of, settings_digest
from finetune_trainer.models.base_reference import is_weights
from finetune_trainer.pod.release import get_release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import date
    from pathlib import Path

    from finetune_crds.recipe import Recipe

# The folder in which transformers saves a tokenizer's named chat templates.
_MORE_TEMPLATES = "additional_chat_templates"


def digest_settings(recipe: Recipe) -> str:
    """Return the digest of a recipe's preparation, regardless of the versions of its sources."""
    return settings_digest(recipe.data, recipe.model, recipe.objective)


def digest(recipe: Recipe, sources: Sequence[str], tokenizer: Path, day: date | None = None) -> str:
    """Return the digest of the rows that a recipe prepares.

    The digest depends on the release: another release may drop or replace text that this release keeps.

    Args:
        sources: identities of the sources and of the evaluation sets, in the order of the recipe.
        tokenizer: folder with the model's tokenizer.
        day: the date that the chat template writes; None if it writes no date.
    """
    days = [] if day is None else [str(day)]
    return digest_of(digest_settings(recipe), [*sources], _digest_content(tokenizer), get_release(), *days)


def _digest_content(folder: Path) -> str:
    """Return the digest of the files of a tokenizer. Weights of the model in the same folder do not count."""
    content_digest = hashlib.sha256()
    for path in _list_files(folder):
        content_digest.update(f"{path.relative_to(folder)}\0".encode())
        with path.open("rb") as file:
            content_digest.update(hashlib.file_digest(file, "sha256").digest())
    return content_digest.hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    for parent in (folder, folder / _MORE_TEMPLATES):
        if parent.is_dir():
            yield from (
                path for path in sorted(parent.iterdir()) if path.is_file() and not is_weights(path.name)
            )
