"""`finetune-prep`: prepare the corpus of the recipe at HYPERPARAMETERS_PATH, or of a recipe on your machine."""

from __future__ import annotations

import os
import signal
import sys

from finetune_crds.contract import RECIPE_PATH, TerminationMessage
from finetune_crds.recipe import Recipe
from finetune_trainer import outcome
from finetune_trainer.prep.plan import request


def main() -> int:
    """Run the preparation, leave a termination message, and return the exit code."""
    end_when_told()
    return outcome.run(_prepare)


def end_when_told() -> None:
    """End this process at once on SIGTERM.

    NB: it is the first of its container, for which the kernel ignores a signal without a handler. Until it was killed,
    Spark would replace the executors that are deleted with it. A commit is written whole or not at all.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def _prepare() -> TerminationMessage:
    recipe = Recipe.load(os.environ.get("HYPERPARAMETERS_PATH", RECIPE_PATH))
    asked = request(recipe)
    # pyspark takes a second to import: a recipe that is refused need not wait for it.
    from finetune_trainer.prep import pipeline

    return TerminationMessage(prep=pipeline.run(recipe, asked))


if __name__ == "__main__":
    sys.exit(main())
