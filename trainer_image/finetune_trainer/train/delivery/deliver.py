"""Uploads and registers the model, once per run, over all attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.train.delivery import lineage
from finetune_trainer.train.delivery.register import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune_crds.contract import TrainResult


def deliver(
    origin: lineage.Lineage,
    run_id: str | None,
    folder: Path,
    write: Callable[[Path], None],
    say: Callable[[str], None],
) -> TrainResult:
    """Upload the model to its MLflow run and register it, unless an earlier attempt did.

    Args:
        origin: the lineage of the model.
        run_id: the MLflow run; None: the model is not uploaded.
        folder: a new folder for the files of the model.
        write: writes them.
        say: prints a line.

    Returns:
        The result of the training, with name and version where the model is registered.

    Raises:
        TrainingError: MLflow rejected the model, or was unreachable for too long.
    """
    recipe, result = origin.recipe, origin.result
    if run_id is None:
        say("MLFLOW_RUN_ID is not set: the model is neither uploaded nor registered")
        return result
    registry = Registry(run_id)
    name = recipe.register_.model if recipe.register_ else None
    version = registry.version_of_run(name) if name else None
    if version is None:
        folder.mkdir()
        write(folder)
        model_id = registry.upload(folder)
        tags = lineage.version_tags(origin)
        version = registry.register(name, model_id, folder, tags) if name else None
    if name is None or version is None:
        return result
    say(f"registered {name} version {version}")
    return result.model_copy(update={"model_name": name, "model_version": version})
