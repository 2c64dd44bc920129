"""The recipe, and its validation."""

from __future__ import annotations

import os

from finetune_crds.contract import RECIPE_PATH
from finetune_crds.data import Columns, Data
from finetune_crds.recipe import Recipe
from finetune_crds.training import LOW_RANK, SOFT_PROMPTS
from finetune_trainer.outcome import RecipeRefusedError


def load_recipe() -> Recipe:
    """Load the recipe at HYPERPARAMETERS_PATH.

    Raises:
        RecipeError: it cannot be read or does not fit the schema.
        RecipeRefusedError: fields contradict each other.
    """
    recipe = Recipe.load(os.environ.get("HYPERPARAMETERS_PATH", RECIPE_PATH))
    refused = refusals(recipe)
    if refused:
        raise RecipeRefusedError("; ".join(refused))
    return recipe


def refusals(recipe: Recipe) -> list[str]:
    """Return the contradictions in a recipe, one sentence each.

    The API server rejects the same FineTuneJobs; this covers recipes that are written by hand.
    """
    method, objective, training = recipe.method, recipe.objective, recipe.training
    columns = recipe.data.columns
    low_rank = method.type in LOW_RANK
    soft = method.type in SOFT_PROMPTS
    table = (
        (method.lora is not None and not low_rank, "method.lora needs type LoRA, QLoRA or DoRA"),
        (
            method.quantization is not None and method.type != "QLoRA",
            "method.quantization needs type QLoRA",
        ),
        (
            method.soft_prompt is not None and not soft,
            "method.softPrompt needs type PrefixTuning or PromptTuning",
        ),
        (method.export == "Merged" and not low_rank, "method.export: Merged needs type LoRA, QLoRA or DoRA"),
        (
            method.soft_prompt is not None
            and method.soft_prompt.init_text is not None
            and method.type == "PrefixTuning",
            "method.softPrompt.initText needs type PromptTuning",
        ),
        (
            objective.type == "DPO" and soft,
            "objective DPO works with method Full, LoRA, QLoRA or DoRA",
        ),
        (
            objective.type == "Distillation" and (soft or method.type == "QLoRA"),
            "objective Distillation works with method Full, LoRA or DoRA",
        ),
        (objective.loss_on is not None and objective.type != "SFT", "objective.lossOn needs type SFT"),
        (objective.dpo is not None and objective.type != "DPO", "objective.dpo needs type DPO"),
        (
            soft and (training.packing or training.compile or training.activation_checkpointing != "None"),
            "virtual tokens are lost under packing, compile and activation checkpointing: set training.packing and "
            "training.compile to false and training.activationCheckpointing to None",
        ),
        (
            (objective.type == "Distillation") != (objective.distillation is not None),
            "objective.distillation and type Distillation require each other",
        ),
        (
            columns is not None and (objective.type == "DPO") != (columns.chosen is not None),
            "objective DPO and data.columns of type Preference go together",
        ),
        (
            objective.loss_on == "Answer"
            and columns is not None
            and example_columns(recipe.data).text is not None,
            "objective.lossOn Answer needs data.columns of type PromptResponse or Messages: a text has no answer",
        ),
        (
            recipe.data.splits is None,
            "data.splits is missing: training reads splits that are prepared already",
        ),
        (
            training.epochs is not None and training.max_steps is not None,
            "training.epochs and training.maxSteps are both set: remove one",
        ),
        (
            training.warmup_steps is not None and training.warmup_ratio is not None,
            "training.warmupSteps and training.warmupRatio are both set: remove one",
        ),
        (
            training.early_stopping is not None and training.eval_every_steps is None,
            "training.earlyStopping needs training.evalEverySteps",
        ),
        (
            training.select == "Best" and (training.eval_every_steps is None or recipe.checkpoint is None),
            "training.select: Best needs training.evalEverySteps and checkpoint",
        ),
    )
    return [sentence for refused, sentence in table if refused]


def example_columns(data: Data) -> Columns:
    """Return the columns that training reads: the preparation names the columns of its table itself."""
    columns = data.columns
    assert columns is not None  # noqa: S101 - the recipe names them, or they were found
    if data.prepare is None:
        return columns
    if columns.chosen is not None:
        return Columns(type="Preference")
    if data.prepare.conversation is not None or columns.messages is not None:
        return Columns(type="Messages", tools=columns.tools and "tools")
    if data.prepare.response_template is not None:
        return Columns(type="PromptResponse")
    if data.prepare.prompt_template is not None or columns.text is not None:
        return Columns(type="Text")
    return Columns(type="PromptResponse")


def row_tokens(recipe: Recipe) -> int:
    """Return the most tokens that a row of a batch holds: a pair of preferences is two documents."""
    pair = 2 if recipe.objective.type == "DPO" else 1
    return pair * recipe.training.max_length
