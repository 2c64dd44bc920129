"""`finetune-prep --recipe FILE`: the preparation of a FineTuneJob on your machine, with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from finetune_crds.base import first_mistake
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.recipe import JobReference, Recipe, RecipeError
from finetune_trainer.pod import spec_rules

if TYPE_CHECKING:
    from tqdm import tqdm

    from finetune_crds.prepare import SplitTables

# NB: the uid is fixed, so that a second run with the same recipe finds the version that the first run wrote.
_UID = "local"


def load_recipe(path: Path, output: str | None = None) -> Recipe:
    """Load the recipe of a FineTuneJob, or a pod's recipe, from a file, changed so that Spark runs in this process.

    Args:
        output: replaces data.prepare.output: a URI, or a folder on this machine, which may be relative.

    Raises:
        RecipeError: the file cannot be read, is invalid, or contains neither a FineTuneJob nor a recipe.
        RecipeRefusedError: the recipe violates rules of FineTuneJob.spec, which no API server has checked.
    """
    manifest = _load_job(path)
    loaded = Recipe.load(path) if manifest is None else _build_recipe(path, manifest)
    prepare = loaded.data.prepare
    if prepare is None:
        # `plan.build_request` refuses it.
        return loaded
    # These fields are for other modes, and are unset.
    cluster_fields = ("executors", "executor_cores", "executor_memory", "databricks")
    local = {"mode": "Local"} | dict.fromkeys(cluster_fields)
    spark = prepare.spark.model_copy(update=local)
    if output and "://" not in output:
        output = str(Path(output).absolute())
    prepare = prepare.model_copy(update={"spark": spark, "output": output or prepare.output})
    if prepare.catalog is None and prepare.split_tables and _are_in_workspace(prepare.split_tables):
        print("data.prepare.splitTables is left out: the tables are in a workspace", flush=True)
        prepare = prepare.model_copy(update={"split_tables": None})
    if not prepare.output:
        raise RecipeError(f"{path} has no data.prepare.output: set a folder with --output")
    # The cache is a PersistentVolumeClaim, which does not exist here.
    model = loaded.model.model_copy(update={"cache": None})
    recipe = loaded.model_copy(
        update={"model": model, "data": loaded.data.model_copy(update={"prepare": prepare})}
    )
    spec_rules.check(recipe)
    return recipe


def _are_in_workspace(split_tables: SplitTables) -> bool:
    """Whether tables have names of Unity Catalog: catalog.schema.table."""
    return any(table.count(".") > 1 for table in split_tables.by_split.values())


def _load_job(path: Path) -> dict[str, Any] | None:
    """Return the FineTuneJob in a file that may contain other resources; None if the file contains no resources or is unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # Recipe.load reports what is wrong with the file.
        return None
    if not any("apiVersion" in document for document in documents):
        return None
    jobs = [document for document in documents if document.get("kind") == "FineTuneJob"]
    if len(jobs) != 1:
        raise RecipeError(f"{path} has {len(jobs)} FineTuneJobs: use a file with exactly one")
    (job,) = jobs
    return job


def _build_recipe(path: Path, job: dict[str, Any]) -> Recipe:
    metadata = job.get("metadata") or {}
    reference = JobReference(
        name=str(metadata.get("name") or path.stem),
        namespace=str(metadata.get("namespace") or "default"),
        uid=_UID,
    )
    try:
        # NB: unknown fields are forbidden, as the API server would refuse them.
        return Recipe.of(reference, FineTuneJobSpec.model_validate(job.get("spec") or {}, extra="forbid"))
    except ValidationError as error:
        where, what = first_mistake(error)
        raise RecipeError(f"the FineTuneJob in {path} is invalid at spec.{where}: {what}") from error


class Bar:
    """A progress bar for the steps of a preparation, on a terminal."""

    def __init__(self) -> None:
        self._step = ""
        self._bar: tqdm[None] | None = None

    def show(self, step: str, percent: int | None) -> None:
        """Show the percent of a step that is done; an unknown percent counts as 0."""
        from tqdm import tqdm

        if step != self._step or self._bar is None:
            self.close()
            self._step = step
            form = "{desc:<16} {percentage:3.0f}% |{bar:40}| {elapsed}"
            # NB: None disables the bar if the output is not a terminal.
            self._bar = tqdm(
                total=100, desc=step, bar_format=form, leave=False, disable=None, file=sys.stderr
            )
        self._bar.update((percent or 0) - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
