"""Refuses models with files whose names lead out of the folder of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path

if TYPE_CHECKING:
    from collections.abc import Iterable

UNSAFE = "ModelUnsafe"
"""Reason of the refusal."""


def check_names(uri: str, names: Iterable[str], *, field: str = "model.base") -> None:
    """Check the files of a model before the first of them is downloaded.

    Args:
        uri: the model, as the field names it.
        field: the field that names the model, for messages.
        names: the paths of the files in the folder of the model, as a store or a server lists them.

    Raises:
        RecipeRefusedError: a path could lead out of the folder.
    """
    for name in names:
        try:
            check_relative_path(name)
        except UnsafePathError as error:
            raise RecipeRefusedError(
                f"{field} {uri} has a file {error}: find out who wrote the file, and delete it",
                reason=UNSAFE,
            ) from error
