"""`finetune-evaluate`: evaluate a version by the recipe at FINETUNE_RECIPE, or fetch it for the user's own command."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from finetune_crds import contract
from finetune_crds.contract import TerminationMessage
from finetune_trainer.pod import exit_status, library_variables
from finetune_trainer.train.runtime.recipe import load_recipe


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation, write a termination message, and return the exit code."""
    options = _options(arguments)
    library_variables.set_defaults()
    exit_status.exit_on_sigterm()
    run = _fetch if options.fetch else _evaluate
    return exit_status.run(partial(run, options.model))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="finetune-evaluate",
        description="Evaluate a model by the recipe at FINETUNE_RECIPE.",
    )
    parser.add_argument(
        contract.EVALUATE_MODEL, required=True, help="the model, for example models:/name/version"
    )
    parser.add_argument(
        contract.EVALUATE_FETCH,
        action="store_true",
        help="only write the model to the folder MODEL_PATH, as one standalone model for your own command",
    )
    return parser.parse_args(arguments)


def _evaluate(model: str) -> TerminationMessage:
    recipe = load_recipe()
    # After load_recipe(), since torch takes seconds to import: a wrong recipe is refused without that wait.
    from finetune_trainer.evaluate import evaluation

    return TerminationMessage(evaluation=evaluation.run(recipe, model))


def _fetch(model: str) -> None:
    recipe = load_recipe()
    from finetune_trainer.evaluate import standalone

    standalone.write(recipe, model, Path(os.environ.get(contract.ENV_MODEL_PATH, contract.MODEL_PATH)))


if __name__ == "__main__":
    sys.exit(main())
