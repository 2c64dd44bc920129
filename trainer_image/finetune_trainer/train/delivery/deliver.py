"""Delivers the model, once per job, over all attempts: to its folder, to its MLflow run, and to the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.train.delivery import lineage, output
from finetune_trainer.train.delivery.register import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune_crds.contract import TrainResult
    from finetune_trainer.models.base_reference import Origin


def deliver(
    model_lineage: lineage.Lineage,
    run_id: str | None,
    folder: Path,
    write: Callable[[Path], None],
    base: Origin | None,
    *,
    say: Callable[[str], None],
    confirm: Callable[[], None] = lambda: None,
) -> TrainResult:
    """Write the model to output.uri, upload it to its MLflow run and register it, unless an earlier attempt did.

    With output.uri, the model is uploaded only if it is registered. Folder and version come from the same attempt: until the
    version exists, each attempt that has trained writes the folder again. Without spec.register, each attempt does so.

    Args:
        model_lineage: the lineage of the model.
        run_id: the MLflow run; None: the model is not uploaded.
        folder: a new folder for the files of the model.
        write: writes the model into that folder.
        base: the address that the base was fetched from; None if it was merged in this pod.
        say: prints a line.
        confirm: called before the folder is written, and before the model is uploaded and registered; raises SupersededError if newer pods of the
            job have taken over.

    Returns:
        The result of the training, with name and version if the model is registered.

    Raises:
        RecipeRefusedError: the pod is not allowed to write output.uri, or the MLflow server does not support register.upload.
        TrainingError: MLflow rejected the model, or was unreachable for too long; or the storage of output.uri failed.
        SupersededError: newer pods of the job have taken over.
    """
    recipe, result = model_lineage.recipe, model_lineage.result
    output_folder = output.folder_of(recipe)
    name = recipe.register_.model if recipe.register_ else None
    registry: Registry | None = None
    if run_id is not None and (name or output_folder is None):
        registry = Registry(run_id, recipe.register_.upload if recipe.register_ else None)
    version = registry.find_version(name) if registry and name else None
    # Without a version, a complete folder is written again: folder and version must come from the same attempt.
    must_publish = output_folder is not None and (version is None or not output_folder.is_finished())
    must_upload = registry is not None and version is None
    if must_publish or must_upload:
        folder.mkdir()
        write(folder)
    if output_folder is not None and must_publish:
        confirm()
        output.publish(output_folder, folder, recipe, base)
        say(f"wrote the model to {output_folder.uri}")
    if registry is None:
        if output_folder is None:
            say("MLFLOW_RUN_ID is not set: the model is neither uploaded nor registered")
        return result
    if version is None:
        confirm()
        model_id = registry.upload(folder)
        confirm()
        tags = lineage.build_version_tags(model_lineage)
        version = registry.register(name, model_id, folder, tags) if name else None
    if name is None or version is None:
        return result
    say(f"registered {name} version {version}")
    return result.model_copy(update={"model_name": name, "model_version": version})
