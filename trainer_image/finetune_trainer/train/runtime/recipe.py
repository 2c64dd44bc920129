"""The recipe, and its validation."""

from __future__ import annotations

import os

from finetune_crds.contract import ENV_RECIPE, RECIPE_PATH
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.recipe import Recipe
from finetune_crds.training import LARGEST_OF_PISSA, LOW_RANK, PISSA_NEEDS, PISSA_RANK, SOFT_PROMPTS, Training
from finetune_trainer.examples.columns import find_misfits, find_table_columns
from finetune_trainer.pod.exit_status import RecipeRefusedError


def load_recipe() -> Recipe:
    """Load the recipe at FINETUNE_RECIPE.

    Raises:
        RecipeError: it cannot be read or does not fit the schema.
        RecipeRefusedError: fields contradict each other.
    """
    recipe = Recipe.load(os.environ.get(ENV_RECIPE, RECIPE_PATH))
    contradictions = find_contradictions(recipe)
    if contradictions:
        raise RecipeRefusedError("; ".join(contradictions))
    return recipe


def find_contradictions(recipe: Recipe) -> list[str]:
    """Return the contradictions in a recipe, one sentence each.

    The API server rejects the same FineTuneJobs; this covers recipes that are written by hand.
    """
    method, objective, training = recipe.method, recipe.objective, recipe.training
    columns = recipe.data.columns
    resume_from = recipe.checkpoint.resume_from if recipe.checkpoint else None
    low_rank = method.type in LOW_RANK
    soft = method.type in SOFT_PROMPTS
    table = (
        (method.lora is not None and not low_rank, "method.lora needs type LoRA, QLoRA or DoRA"),
        (
            method.lora is not None and method.lora.init == "PiSSA" and low_rank and method.type != "LoRA",
            f"method.{PISSA_NEEDS}",
        ),
        (
            method.lora is not None and method.lora.init == "PiSSA" and method.lora.rank > LARGEST_OF_PISSA,
            f"method.lora.{PISSA_RANK}",
        ),
        (
            recipe.model.adapter == "Continue" and (not low_rank or method.lora is not None),
            "model.adapter: Continue needs method LoRA, QLoRA or DoRA without method.lora: the adapter has its own rank and layers",
        ),
        *_rules_of_new_tokens(recipe),
        (
            method.lora is not None and bool({*method.lora.modules_to_save} & {*method.lora.target_modules}),
            "a layer of method.lora.modulesToSave is trained whole and has no adapter: remove it from targetModules",
        ),
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
        *(
            (
                objective.type == name and soft,
                f"objective {name} works with method Full, LoRA, QLoRA or DoRA",
            )
            for name in COLUMNS_OF_OBJECTIVE
        ),
        (
            objective.type == "Distillation" and (soft or method.type == "QLoRA"),
            "objective Distillation works with method Full, LoRA or DoRA",
        ),
        (objective.loss_on is not None and objective.type != "SFT", "objective.lossOn needs type SFT"),
        (
            objective.label_smoothing is not None and objective.type != "SFT",
            "objective.labelSmoothing needs type SFT: for DPO set objective.dpo.labelSmoothing",
        ),
        *(
            (
                getattr(objective, name.lower()) is not None and objective.type != name,
                f"objective.{name.lower()} needs type {name}",
            )
            for name in COLUMNS_OF_OBJECTIVE
        ),
        (
            objective.dpo is not None
            and objective.dpo.loss != "Sigmoid"
            and objective.dpo.label_smoothing > 0,
            "objective.dpo.labelSmoothing needs objective.dpo.loss: Sigmoid",
        ),
        (
            training.neftune_alpha is not None and soft,
            "training.neftuneAlpha works with method Full, LoRA, QLoRA or DoRA: the embeddings of virtual tokens get no noise",
        ),
        (
            soft and (training.packing or training.compile or training.activation_checkpointing != "None"),
            "virtual tokens are lost under packing, compile and activation checkpointing: set training.packing and "
            "training.compile to false and training.activationCheckpointing to None",
        ),
        (
            (objective.type == "Distillation") != (objective.distillation is not None),
            "objective.distillation and type Distillation require each other",
        ),
        *((True, sentence) for sentence in find_misfits(recipe.data, objective)),
        (
            objective.loss_on in ("Answer", "LastAnswer")
            and columns is not None
            and find_table_columns(recipe.data).text is not None,
            "objective.lossOn Answer and LastAnswer need data.columns of type PromptResponse or Messages: a text has no answer",
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
        *_rules_of_schedule(training),
        *_rules_of_optimizer(recipe),
        (
            training.early_stopping is not None and training.eval_every_steps is None,
            "training.earlyStopping needs training.evalEverySteps",
        ),
        (
            training.select == "Best" and (training.eval_every_steps is None or recipe.checkpoint is None),
            "training.select: Best needs training.evalEverySteps and checkpoint",
        ),
        (
            resume_from is not None and (resume_from.type != "Uri" or not resume_from.uri),
            "checkpoint.resumeFrom in a recipe needs type Uri and uri: a pod does not know the jobs of a cluster",
        ),
    )
    return [sentence for refused, sentence in table if refused]


def _rules_of_new_tokens(recipe: Recipe) -> tuple[tuple[bool, str], ...]:
    """Contradictions of model.newTokens: whether each is there, and its sentence."""
    has_new_tokens, method = bool(recipe.model.new_tokens), recipe.method
    return (
        (
            has_new_tokens and recipe.model.adapter == "Continue",
            "model.newTokens needs model.adapter: Merge, since an adapter keeps its vocabulary",
        ),
        (
            has_new_tokens and method.type in SOFT_PROMPTS,
            "model.newTokens works with method Full, LoRA, QLoRA or DoRA: virtual tokens train no embedding",
        ),
        (
            has_new_tokens and method.type in LOW_RANK and method.export != "Merged",
            "model.newTokens with an adapter needs method.export: Merged, since the base has no rows for them",
        ),
        (
            has_new_tokens and recipe.objective.type == "Distillation",
            "model.newTokens does not work with objective Distillation, whose teacher has no rows for them",
        ),
    )


def _rules_of_schedule(training: Training) -> tuple[tuple[bool, str], ...]:
    """Contradictions in the decay and the floor of the learning rate: whether each is there, and its sentence."""
    floor, steps, ratio = training.min_learning_rate, training.decay_steps, training.decay_ratio
    longest = training.max_steps
    return (
        (
            steps is not None and ratio is not None,
            "training.decaySteps and training.decayRatio are both set: remove one",
        ),
        (
            (steps is not None or ratio is not None) and training.scheduler != "WSD",
            "training.decaySteps and training.decayRatio need training.scheduler: WSD",
        ),
        (
            ratio is not None and (training.warmup_ratio or 0.0) + ratio > 1.0,
            "training.warmupRatio and training.decayRatio together are above 1: lower one of them",
        ),
        (
            steps is not None and longest is not None and training.warmup_of(longest) + steps > longest,
            "training.decaySteps and the warm-up are longer than training.maxSteps: lower one of them",
        ),
        (
            floor is not None and training.scheduler == "Constant",
            "training.minLearningRate needs training.scheduler Linear, Cosine or WSD",
        ),
        (
            floor is not None and floor >= training.learning_rate,
            f"training.minLearningRate is not below training.learningRate, {training.learning_rate:g}: lower it",
        ),
    )


def _rules_of_optimizer(recipe: Recipe) -> tuple[tuple[bool, str], ...]:
    """Contradictions of training.optimizer: whether each is there, and its sentence."""
    optimizer, full = recipe.training.optimizer, recipe.method.type == "Full"
    muon, bf16 = optimizer.type == "Muon", optimizer.weights == "BF16"
    return (
        (muon and not full, "training.optimizer.type Muon needs method Full: set AdamW or AdamW8bit"),
        (
            bf16 and not full,
            "training.optimizer.weights BF16 needs method Full: adapters are small, and the base under them is not kept in fp32",
        ),
        (
            bf16 and recipe.training.precision != "BF16",
            "training.optimizer.weights BF16 needs training.precision BF16",
        ),
        (bf16 and muon, "training.optimizer.weights BF16 needs training.optimizer.type AdamW or AdamW8bit"),
        (
            optimizer.momentum is not None and not muon,
            "training.optimizer.momentum needs training.optimizer.type Muon",
        ),
    )


def row_tokens(recipe: Recipe) -> int:
    """Return the most tokens that a row of a batch holds: an example of two answers has two documents."""
    documents = 2 if recipe.objective.type in COLUMNS_OF_OBJECTIVE else 1
    return documents * recipe.training.max_length
