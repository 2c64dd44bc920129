"""The recipe, and what of it this trainer does not do yet."""

from __future__ import annotations

import os

from finetune_crds.contract import RECIPE_PATH
from finetune_crds.recipe import Recipe
from finetune_trainer.outcome import RecipeRefusedError


def load_recipe() -> Recipe:
    """The recipe at HYPERPARAMETERS_PATH.

    Raises:
        RecipeError: it cannot be read or does not fit the schema.
        RecipeRefusedError: it asks for something that is not available, or contradicts itself.
    """
    recipe = Recipe.load(os.environ.get("HYPERPARAMETERS_PATH", RECIPE_PATH))
    refused = refusals(recipe)
    if refused:
        raise RecipeRefusedError("; ".join(refused))
    return recipe


def refusals(recipe: Recipe) -> list[str]:
    """What is wrong with the recipe or not available in it, a sentence each.

    The API server and the operator refuse the same earlier; this is for recipes that came another way.
    """
    method, objective, training = recipe.method, recipe.objective, recipe.training
    strategy, recompute = recipe.distributed.strategy, training.activation_checkpointing
    table = (
        (
            method.type not in ("Full", "LoRA"),
            f"method.type {method.type} is not available yet: use Full or LoRA",
        ),
        (
            method.type == "Full" and method.lora is not None,
            "method.lora needs method.type LoRA: remove it or change the type",
        ),
        (
            method.type == "Full" and bool(method.merge),
            "method.merge needs method.type LoRA: remove it or change the type",
        ),
        (objective.type != "SFT", f"objective.type {objective.type} is not available yet: use SFT"),
        (
            objective.type == "SFT" and recipe.data.columns.chosen is not None,
            "data.columns.chosen is for objective DPO, which is not available yet",
        ),
        (
            objective.loss_on == "Answer" and recipe.data.columns.text is not None,
            "objective.lossOn Answer needs data.columns.prompt and response, or messages: a text has no answer",
        ),
        (
            recipe.data.splits is None,
            "data.splits is missing: training reads splits that are prepared already",
        ),
        (strategy != "FSDP", f"distributed.strategy {strategy} is not available yet: use FSDP"),
        (
            training.epochs is not None and training.max_steps is not None,
            "training.epochs and training.maxSteps are both set: remove one",
        ),
        (
            training.warmup_steps is not None and training.warmup_ratio is not None,
            "training.warmupSteps and training.warmupRatio are both set: remove one",
        ),
        (
            recompute not in ("None", "Full"),
            f"training.activationCheckpointing {recompute} is not available yet: use None or Full",
        ),
        (training.compile, "training.compile is not available yet: set it to false"),
        (training.load_best, "training.loadBest is not available yet: set it to false"),
    )
    return [sentence for refused, sentence in table if refused]
