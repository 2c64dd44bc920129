"""`finetune-prep`: prepare the corpus of the recipe at FINETUNE_RECIPE, or of a FineTuneJob on your machine."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from finetune_crds.contract import ENV_RECIPE, RECIPE_PATH, TerminationMessage
from finetune_crds.recipe import Recipe
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.prep.plan import build_request


def main(arguments: list[str] | None = None) -> int:
    """Run the preparation, write a termination message, and return the exit code."""
    options = _options(arguments)
    library_variables.set_defaults(TOKENIZERS_PARALLELISM="false")
    exit_status.exit_on_sigterm()
    if options.recipe is None:
        return exit_status.run(_prepare)
    return exit_status.run(partial(_prepare_here, options))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune-prep",
        description="Prepare the corpus of a FineTuneJob. Without --recipe, prepare the recipe at FINETUNE_RECIPE.",
    )
    parser.add_argument(
        "--recipe", type=Path, help="the manifest of a FineTuneJob, or a recipe: prepare it on this machine"
    )
    parser.add_argument(
        "--output", help="the table, in place of data.prepare.output: a folder, or s3://bucket/folder"
    )
    parser.add_argument(
        "--report", type=Path, default=Path("report"), help="folder for the report (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def _prepare() -> TerminationMessage:
    """Prepare the recipe of this pod."""
    recipe = Recipe.load(os.environ.get(ENV_RECIPE, RECIPE_PATH))
    request = build_request(recipe)
    # pyspark takes a second to import: a recipe that is refused need not wait for it.
    from finetune_trainer.prep import pipeline

    return TerminationMessage(prep=pipeline.run(recipe, request))


def _prepare_here(options: argparse.Namespace) -> TerminationMessage:
    """Prepare the recipe or FineTuneJob of --recipe with Spark in this process, and show a progress bar."""
    from finetune_trainer.prep import laptop

    recipe = laptop.load_recipe(options.recipe, options.output)
    request = build_request(recipe)
    options.report.mkdir(parents=True, exist_ok=True)
    from finetune_trainer.prep import pipeline

    with closing(laptop.Bar()) as bar:
        result = pipeline.run(recipe, request, reports=options.report, show=bar.show)
    print(f"the report is in {options.report}", flush=True)
    return TerminationMessage(prep=result)


if __name__ == "__main__":
    sys.exit(main())
