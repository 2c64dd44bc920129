"""`finetune-prep-databricks`: the preparation inside a Databricks run, in the Spark session of the run.

The wheel with this entry point, the recipe and the result are files in a folder of a volume. The operator, which
submitted the run, reads the result there: the output of a run contains at most the end of its log.

If the job's MLflow run is in the same workspace, the report and the progress are also logged to it, with the login that
every Databricks run has. The login to any other MLflow server exists only in the Kubernetes cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds import contract
from finetune_crds.contract import RunReport, TerminationMessage
from finetune_crds.recipe import Recipe
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.spark.progress import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune_crds.tracking import Tracking

# The tracking URI of the workspace in which this code runs; MLflow's client itself finds the login.
_WORKSPACE = "databricks"


class PreparationFailedError(Exception):
    """The preparation failed; Databricks shows the sentence as the error of the run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the preparation of the recipe in a folder, and write its report there.

    Raises:
        PreparationFailedError: the preparation failed; the report has the reason.
    """
    parser = argparse.ArgumentParser(prog=contract.PREP_WHEEL_ENTRY)
    parser.add_argument(
        contract.PARAMETER_FOLDER, type=Path, required=True, help="the folder with recipe.yaml"
    )
    parser.add_argument(
        contract.PARAMETER_MLFLOW_RUN,
        default="",
        help="the MLflow run of the job, if it is in this workspace",
    )
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    reported_error = ""

    def write_report(code: int, message: TerminationMessage | None) -> None:
        nonlocal reported_error
        report = RunReport(exit_code=code, message=message or TerminationMessage())
        # NB: a volume has no rename, so the operator may read a truncated report. It is not valid JSON, and is ignored.
        (folder / contract.REPORT_FILE).write_text(
            report.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8"
        )
        reported_error = (
            f"{message.error.reason}: {message.error.message}" if message and message.error else ""
        )

    code = exit_status.run(lambda: _prepare(folder, options.mlflow_run), write_report)
    if code:
        # NB: Databricks treats every exit code as a crash; an exception also tells it the reason.
        raise PreparationFailedError(reported_error or f"the preparation ended with exit code {code}")


def _prepare(folder: Path, run_id: str) -> TerminationMessage:
    recipe = Recipe.load(folder / contract.RECIPE_FILE)
    request = build_request(recipe)
    library_variables.set_defaults(TOKENIZERS_PARALLELISM="false")
    if recipe.model.base.startswith("models:/"):
        _select_registry(recipe.tracking)
    # These imports take seconds: a recipe that is refused need not wait for them.
    from finetune_trainer.examples.tokenizer import Loaded
    from finetune_trainer.pod.mlflow_run import Tracker, create_client
    from finetune_trainer.prep import pipeline
    from finetune_trainer.prep.report import report
    from finetune_trainer.prep.spark import session
    from finetune_trainer.prep.spark.progress import Progress, SparkTasks, show_in_run

    connect = partial(create_client, _WORKSPACE)
    with (
        pipeline.fetch_tokenizer(recipe) as tokenizer_folder,
        Tracker(run_id, connect) as tracker,
    ):
        tokenizer = Loaded.of(recipe.model, tokenizer_folder)
        spark = session.attach()
        context = session.context(spark)
        pipeline.log(f"Databricks Runtime {os.environ[session.ENV_RUNTIME]}, Spark {spark.version}")
        if not run_id:
            pipeline.log(
                f"the report is only in {folder}: the MLflow run of the job is not in this workspace"
            )

        def show(step: str, percent: int | None) -> None:
            _write_progress(folder / contract.PROGRESS_FILE, step, percent)
            show_in_run(tracker, step, percent)

        progress = Progress(show, SparkTasks(context) if context else None)
        publish = partial(report.publish, tracker=tracker, folder=folder)
        with progress.running():
            return TerminationMessage(
                prep=pipeline.prepare(spark, recipe, request, tokenizer, progress, publish=publish)
            )


def _select_registry(tracking: Tracking) -> None:
    """Let MLflow's client read the registered model of the recipe: without these variables, it may use a file of the run, or another registry."""
    os.environ["MLFLOW_TRACKING_URI"] = _WORKSPACE
    if tracking.registry_uri:
        os.environ["MLFLOW_REGISTRY_URI"] = tracking.registry_uri


def _write_progress(file: Path, step: str, percent: int | None) -> None:
    """Write the step into a file, which the operator reads. Errors are ignored: they must not stop a preparation."""
    with contextlib.suppress(OSError):
        file.write_text(describe(step, percent), encoding="utf-8")
