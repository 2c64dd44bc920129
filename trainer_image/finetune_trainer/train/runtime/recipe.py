"""Loads the recipe of a training pod."""

from __future__ import annotations

import os

from finetune_crds.contract import ENV_RECIPE, RECIPE_PATH
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.recipe import Recipe
from finetune_trainer.pod.exit_status import RecipeRefusedError


def load_recipe() -> Recipe:
    """Load the recipe at FINETUNE_RECIPE.

    Raises:
        RecipeError: the recipe cannot be read or does not fit the schema.
        RecipeRefusedError: the recipe lacks fields that the operator writes into the recipe of a job.
    """
    recipe = Recipe.load(os.environ.get(ENV_RECIPE, RECIPE_PATH))
    missing = _list_missing(recipe)
    if missing:
        raise RecipeRefusedError("; ".join(missing))
    return recipe


def _list_missing(recipe: Recipe) -> list[str]:
    """Return a sentence for each value that a recipe lacks, and that the operator adds to the recipe of a job."""
    checkpoint = recipe.checkpoint
    resume_from = checkpoint.resume_from if checkpoint else None
    requirements = (
        (
            recipe.data.splits is None,
            "data.splits is missing: training reads prepared splits",
        ),
        (
            recipe.training.select == "Best" and checkpoint is None,
            "training.select: Best needs checkpoint: the best checkpoint is registered",
        ),
        (
            resume_from is not None and resume_from.type != "Uri",
            "checkpoint.resumeFrom in a recipe needs type Uri and uri: a pod cannot look up the jobs of a cluster",
        ),
    )
    return [sentence for is_missing, sentence in requirements if is_missing]


def row_tokens(recipe: Recipe) -> int:
    """Return the most tokens that a row of a batch can have: an example of two answers has two documents."""
    # The objectives with columns of their own are those that compare two answers.
    documents = 2 if recipe.objective.type in COLUMNS_OF_OBJECTIVE else 1
    return documents * recipe.training.max_length
