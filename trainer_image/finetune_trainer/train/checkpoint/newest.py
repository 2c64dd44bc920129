"""Finds the checkpoint to resume from: the newest checkpoint of the job, or of the job in checkpoint.resumeFrom."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from finetune_crds import contract
from finetune_crds.continuation import differences
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError
from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint.folder import CheckpointFolder, DamagedError, Save
from finetune_trainer.train.checkpoint.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.checkpoint.folder import Marker


@dataclass(frozen=True)
class ResumePoint:
    """A complete, undamaged checkpoint that the recipe may resume from.

    progress: names the best checkpoint only if it is usable; `best_in` is empty if the best checkpoint is in the job's own folder.
    save: the save of the checkpoint.
    best: the save of the best checkpoint, if there is one.
    settings: of the recipe that wrote the checkpoint; empty if an earlier release wrote it.
    """

    progress: Progress
    save: Save
    best: Save | None
    settings: Mapping[str, Any] = field(default_factory=dict)


def locate_resume_from(recipe: Recipe) -> tuple[str, int | None] | None:
    """Return the folder of checkpoint.resumeFrom, and its step if it names one checkpoint; None without resumeFrom."""
    resume_from = recipe.checkpoint.resume_from if recipe.checkpoint else None
    return contract.split_checkpoint_uri(resume_from.uri) if resume_from and resume_from.uri else None


def explain_start_over(job_folder: str, recipe: Recipe) -> str:
    """Explain how to start without the job's own checkpoints, as the end of a sentence."""
    where = "over" if locate_resume_from(recipe) is None else "from checkpoint.resumeFrom again"
    return f"delete the folder {job_folder} to start {where}"


def find_newest(job_folder: str, recipe: Recipe) -> ResumePoint | None:
    """Return the newest checkpoint in the job's own folder, or else in checkpoint.resumeFrom; None if the job has neither.

    Raises:
        RecipeRefusedError: the checkpoint belongs to another recipe, all checkpoints are damaged, or checkpoint.resumeFrom has no complete
            checkpoint.
        TrainingError: the storage failed.
    """
    checkpoint = _find_newest_in(job_folder, explain_start_over(job_folder, recipe))
    if checkpoint is not None:
        progress, marker, save = checkpoint
        remedy = f"set the fields back, or {explain_start_over(job_folder, recipe)}"
        _check_settings(contract.checkpoint_uri(job_folder, progress.step), progress, marker, recipe, remedy)
        progress, best = _locate_best(progress, job_folder, job_folder)
        return ResumePoint(progress, save, best, marker.settings)
    resume_from = locate_resume_from(recipe)
    if resume_from is None:
        return None
    foreign_folder, step = resume_from
    checkpoint = _find_newest_in(foreign_folder, "set checkpoint.resumeFrom to another checkpoint", only=step)
    if checkpoint is None:
        address = foreign_folder if step is None else contract.checkpoint_uri(foreign_folder, step)
        raise RecipeRefusedError(
            f"checkpoint.resumeFrom: {address} has no complete checkpoint: set resumeFrom to "
            "the status.checkpoint.uri of a job, or remove it",
            reason="CheckpointNotFound",
        )
    progress, marker, save = checkpoint
    uri = contract.checkpoint_uri(foreign_folder, progress.step)
    if not marker.settings:
        raise RecipeRefusedError(
            f"the checkpoint {uri} was written by an earlier release, which did not record the settings of the run: resume that "
            "job with this release until it writes a new checkpoint and use that one, or create this job without "
            "checkpoint.resumeFrom",
            reason="ForeignCheckpoint",
        )
    remedy = "create the job with the values of that run, or without checkpoint.resumeFrom"
    _check_settings(uri, progress, marker, recipe, remedy)
    progress, best = _locate_best(progress, foreign_folder, job_folder)
    progress = progress.for_new_job(
        uri, _choose_data_version(recipe, progress, marker), _choose_table_versions(recipe, progress, marker)
    )
    return ResumePoint(progress, save, best, marker.settings)


def _find_newest_in(
    folder: str, remedy: str, *, only: int | None = None
) -> tuple[Progress, Marker, Save] | None:
    """Return the newest undamaged checkpoint in a folder, or the checkpoint of step `only`; None if there is no complete checkpoint.

    Raises:
        RecipeRefusedError: there are complete checkpoints, but all of them are damaged.
        TrainingError: the storage failed.
    """
    checkpoints = CheckpointFolder(folder)
    damaged: list[str] = []
    with _raise_storage_errors(folder):
        for step in reversed(checkpoints.list_complete_steps()):
            if only is not None and step != only:
                continue
            try:
                marker, save = checkpoints.read(step)
            except DamagedError as error:
                damaged.append(f"the checkpoint {contract.checkpoint_uri(folder, step)} is damaged ({error})")
                continue
            for sentence in damaged:
                print(f"{sentence}: using the older checkpoint of step {step}", flush=True)
            return Progress.of(marker.progress), marker, save
    if damaged:
        newest_damage, *_ = damaged
        no_older = " and there is no older checkpoint" if only is None else ""
        raise RecipeRefusedError(
            f"{newest_damage}{no_older}: restore its files, or {remedy}",
            reason="CheckpointDamaged",
        )
    return None


def _check_settings(uri: str, progress: Progress, marker: Marker, recipe: Recipe, remedy: str) -> None:
    """Check that the recipe has the settings of a checkpoint, or the recorded digest if an earlier release wrote the checkpoint."""
    if marker.settings:
        changes = differences(marker.settings, recipe)
    else:
        digest = recipe.digest()
        change = f"recipe {progress.recipe} -> {digest} (written by an earlier release, which recorded only the digest)"
        changes = [] if progress.recipe == digest else [change]
    if changes:
        raise RecipeRefusedError(
            f"the checkpoint {uri} belongs to a run with other settings ({'; '.join(changes)}): {remedy}",
            reason="ForeignCheckpoint",
        )


def _choose_data_version(recipe: Recipe, progress: Progress, marker: Marker) -> int | None:
    """Return the version of the splits in the recipe, or else the version that the earlier run read from the same table; None: the newest."""
    splits = recipe.data.splits
    if splits is None:
        return None
    if splits.version is not None:
        return splits.version
    return progress.data_version if marker.settings.get("data.splits.path") == splits.path else None


def _choose_table_versions(recipe: Recipe, progress: Progress, marker: Marker) -> str:
    """Return the versions that the earlier run read of the tables of splits that the recipe names too; the newest of the others."""
    tables = recipe.data.splits.tables if recipe.data.splits else {}
    same_splits = [
        split for split, name in tables.items() if marker.settings.get(f"data.splits.{split}") == name
    ]
    versions = progress.table_versions.split(",")
    return ",".join(version for version in versions if version.partition("=")[0] in same_splits)


def _locate_best(progress: Progress, folder: str, job_folder: str) -> tuple[Progress, Save | None]:
    """Return the progress of a checkpoint in `folder` for a job in `job_folder`, and the save of the best checkpoint.

    `best_in` becomes empty if the best checkpoint is in `job_folder`. If that checkpoint is unusable, the progress names no best checkpoint.
    """
    step, best_folder = progress.best_step, progress.best_in or folder
    if step is None:
        return progress, None
    with _raise_storage_errors(best_folder):
        try:
            _marker, save = CheckpointFolder(best_folder).read(step)
        except (DamagedError, FileNotFoundError) as error:
            uri = contract.checkpoint_uri(best_folder, step)
            print(f"the best checkpoint {uri} is unusable ({error})", flush=True)
            return progress.without_best(), None
    return replace(progress, best_in="" if best_folder == job_folder else best_folder), save


@contextmanager
def _raise_storage_errors(folder: str) -> Iterator[None]:
    """Raise a storage error as a TrainingError; do not change other errors."""
    try:
        yield
    except PodFailure:
        raise
    except Exception as error:
        reason = filesystems.describe_failure(error)
        if reason is None:
            raise
        raise TrainingError(
            "CheckpointUnreadable", f"the checkpoints in {folder} cannot be read: {reason}"
        ) from error
