"""The Databricks run of a preparation: the request to submit it, its login, and its folder."""

from __future__ import annotations

from dataclasses import replace

from finetune_crds import JobRecipe
from finetune_crds.env import LocalReference
from finetune_operator.databricks.access import find_named_login
from finetune_operator.databricks.model import Submission
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.settings import Settings


def find_login(ftj: FineTuneJob, settings: Settings) -> LocalReference | None:
    """Return the Secret with the login to the workspace; None for the chart's login."""
    return find_named_login(ftj.spec, settings) if ftj.spec else None


def find_folder(ftj: FineTuneJob) -> str:
    """The folder of the current run in the volume. The uid keeps a job apart from a deleted job of the same name."""
    run = ftj.status.databricks_run
    databricks = ftj.spec.databricks if ftj.spec else None
    volume = databricks.volume if databricks else ""
    return f"{volume}/jobs/{ftj.namespace}-{ftj.name}-{ftj.uid[:8]}/{run.attempt if run else 1}"


def build_submission(draft: Draft) -> Submission:
    """The run to submit.

    Raises:
        ValueError: the job has no preparation on Databricks.
    """
    databricks, run, ftj = draft.spec.databricks, draft.status.databricks_run, draft.ftj
    if databricks is None or run is None or draft.spec.prepare is None:
        raise ValueError(f"{ftj.key} has no preparation on Databricks")
    recipe, mlflow = _build_recipe(draft), draft.observed.mlflow
    ftj_with_new_status = replace(ftj, status=draft.status)
    return Submission(
        name=build_run_name(draft),
        # A repeated submission with the same token returns the same run.
        token=f"{ftj.uid}-{recipe.digest()}-{run.attempt}",
        volume=databricks.volume,
        folder=find_folder(ftj_with_new_status),
        recipe=recipe.to_yaml(),
        compute=databricks.compute,
        conf=draft.spec.prepare.spark.conf,
        mlflow_run=mlflow.run.run_id if mlflow and mlflow.run else "",
        mlflow_host=mlflow.server if mlflow else "",
    )


def build_run_name(draft: Draft) -> str:
    """The name by which the operator finds a run whose id is not in the status."""
    run = draft.status.databricks_run
    return f"finetune-prep {draft.ftj.key} {draft.ftj.uid} {run.attempt if run else 1}"


def _build_recipe(draft: Draft) -> JobRecipe:
    """The recipe without the model cache, which is a claim that only pods can mount."""
    spec, ftj = draft.spec, draft.ftj
    model = spec.model.model_copy(update={"cache": None}) if spec.model else None
    return JobRecipe.of(ftj.reference, spec.model_copy(update={"model": model}))
