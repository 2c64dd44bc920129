"""The network of a recipe: loaded, adapted, sharded, and with its teacher where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_crds.training import Dpo as DpoSpec
from finetune_crds.training import Method
from finetune_trainer import artifacts
from finetune_trainer.tokenizer import check_same_vocabulary, check_vocabulary, load_tokenizer
from finetune_trainer.train import adapt, load, memory, shard
from finetune_trainer.train.network import Network
from finetune_trainer.train.objectives.distillation import Distillation, TeacherStates
from finetune_trainer.train.objectives.dpo import Dpo
from finetune_trainer.train.objectives.sft import Sft

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.distributed import World

_TEACHER = "objective.distillation.teacher"


def row_tokens(recipe: Recipe) -> int:
    """Tokens that a row of a batch holds at most: a pair of preferences is two documents."""
    pair = 2 if recipe.objective.type == "DPO" else 1
    return pair * recipe.training.max_length


def network(
    recipe: Recipe, source: Path, tokenizer: PreTrainedTokenizerBase, world: World, teacher_folder: Path
) -> Network:
    """The model with what the method trains and what the objective asks, sharded, with all its weights.

    Args:
        recipe: the recipe.
        source: folder of the base model.
        tokenizer: the base model's.
        world: the ranks, all of which make one.
        teacher_folder: where a teacher is downloaded to.

    Raises:
        RecipeRefusedError: a model cannot be loaded or adapted, or does not fit into memory.
    """
    training = recipe.training
    model = world.agree(lambda: load.skeleton(recipe, source, world))
    rows = model.get_input_embeddings().weight.shape[0]
    world.agree(lambda: check_vocabulary(tokenizer, rows, recipe.model.base))
    teacher = None
    if recipe.objective.distillation is not None:
        teacher = _teacher(
            recipe, tokenizer, model.config.get_text_config().vocab_size, world, teacher_folder
        )
    adapted = world.agree(lambda: adapt.adapt(model, recipe.method, recipe.model.base))
    made = Network(adapted, _objective(recipe, teacher))
    recompute = world.agree(lambda: memory.choose(made, recipe, world, row_tokens(recipe), teacher))
    shard.recompute_activations(adapted, recompute, compiled=training.compile)
    over = shard.mesh(recipe.distributed.strategy, world)
    shard.shard(made, over, training.precision, frozen_whole=recipe.method.type == "QLoRA")
    load.fill(adapted, recipe, source, world, tokenizer)
    if training.compile:
        world.agree(lambda: shard.compile_layers(made))
    return made


def _objective(recipe: Recipe, teacher: Network | None) -> Sft | Dpo | Distillation:
    objective = recipe.objective
    if objective.type == "DPO":
        return Dpo((objective.dpo or DpoSpec()).beta)
    if objective.distillation is not None and teacher is not None:
        return Distillation(objective.distillation, teacher)
    return Sft()


def _teacher(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocabulary: int, world: World, folder: Path
) -> Network:
    """The teacher, frozen and sharded over all ranks."""
    own = _teacher_recipe(recipe)
    named = own.model.base
    source = world.agree_in_pod(lambda: artifacts.fetch(named, folder, field=_TEACHER))

    def check() -> None:
        check_same_vocabulary(tokenizer, load_tokenizer(own.model, source), recipe.model.base, named)

    world.agree(check)
    model = world.agree(lambda: load.skeleton(own, source, world, field=_TEACHER))
    taught = model.config.get_text_config().vocab_size
    world.agree(lambda: load.check_same_logits(vocabulary, taught, recipe.model.base, named))
    teacher = Network(model.requires_grad_(False).eval(), TeacherStates())
    shard.shard(teacher, shard.mesh("FSDP", world), own.training.precision)
    load.materialise(teacher, world.device)
    load.read_weights(model, own.model, source, world, field=_TEACHER)
    return teacher


def _teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe as far as it concerns the teacher: another base, and nothing of it trained."""
    assert recipe.objective.distillation is not None  # noqa: S101 - asked only where there is one
    model = recipe.model.model_copy(
        update={"base": recipe.objective.distillation.teacher, "revision": None, "chat_template": None}
    )
    # Frozen weights have the precision they compute in, as those under an adapter do.
    return recipe.model_copy(update={"model": model, "method": Method(type="LoRA")})
