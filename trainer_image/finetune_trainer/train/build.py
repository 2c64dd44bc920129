"""Builds the network of a recipe: loads, adapts and shards the model, and its teacher if it has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.objective import Dpo as DpoSpec
from finetune_crds.objective import Kto as KtoSpec
from finetune_crds.objective import Orpo as OrpoSpec
from finetune_crds.objective import RewardModel as RewardModelSpec
from finetune_crds.objective import Simpo as SimpoSpec
from finetune_crds.training import Method
from finetune_trainer.examples.tokenizer import (
    check_same_vocabulary,
    check_vocabulary,
    load_tokenizer,
    pad_id,
)
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.adapters import adapt, pissa
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.checks import parity, recomputation
from finetune_trainer.train.model.memory import fit
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import Network, Objective
from finetune_trainer.train.model.weights import fill, load, merge
from finetune_trainer.train.objectives.distillation import Distillation, TeacherStates
from finetune_trainer.train.objectives.dpo import Dpo, Ipo
from finetune_trainer.train.objectives.kto import Kto
from finetune_trainer.train.objectives.orpo import Orpo
from finetune_trainer.train.objectives.reward import RewardModel
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.objectives.simpo import Simpo
from finetune_trainer.train.runtime.recipe import row_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_crds.contract import MemoryPlan
    from finetune_crds.objective import Objective as ObjectiveSpec
    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_trainer.models.download import Source
    from finetune_trainer.train.runtime.distributed import World

_TEACHER = "objective.distillation.teacher"


def check_base(recipe: Recipe, config: Path, world: World) -> None:
    """Check the config of a base before its weights are fetched: whether the recipe can train this model.

    Args:
        recipe: the recipe.
        config: folder of the config.
        world: this rank.

    Raises:
        RecipeRefusedError: the base cannot be loaded, adapted, or recomputed.
    """
    model = load.build_skeleton(recipe, config, world)
    recomputation.check_supported(model, recipe)
    # With Continue, the settings of an adapter that has not been read yet replace the parameters of the method.
    if recipe.model.adapter != "Continue":
        adapt.adapt(model, recipe.method, recipe.model.base)


def build_network(
    recipe: Recipe,
    source: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    teacher_folder: Path,
    *,
    adapter_source: Source | None = None,
    load_initial: Callable[[nn.Module], None] | None = None,
    on_plan: Callable[[MemoryPlan], None] = lambda _plan: None,
    check_key: str = "",
    is_checked: bool = False,
    verdict: recomputation.Verdict | None = None,
    on_verdict: Callable[[recomputation.Verdict], None] = lambda _verdict: None,
) -> Network:
    """Build the sharded network with the parameters of the method and the computation of the objective.

    Args:
        recipe: the recipe.
        source: folder of the base model.
        tokenizer: the base model's.
        world: the ranks, all of which call this together.
        teacher_folder: the folder that a teacher is downloaded to.
        adapter_source: the base with the adapter to train further; None: no adapter is continued.
        load_initial: loads the initial weights of PiSSA layers from the checkpoint of an earlier attempt; None: there is no checkpoint.
        on_plan: called with the memory plan before weights are loaded, and again if activation checkpointing changes.
        check_key: identifies everything that the results of the checks depend on (`probe.compute_key`); empty: results are not stored.
        is_checked: whether the logits passed their check in an earlier attempt (`parity.check`).
        verdict: an earlier attempt's verdict on activation checkpointing; used only if its kind and key match.
        on_verdict: called with the verdict that this attempt uses, if it needs one.

    Raises:
        RecipeRefusedError: a model cannot be loaded or adapted, does not fit into memory, or its logits in training differ from those in transformers.
    """
    quantized = recipe.method.type == "QLoRA"
    # With Continue, model.base is an adapter, which names its own base.
    base_of_adapter = adapter_source.adapter_of if adapter_source else None
    base = base_of_adapter or recipe.model.base
    model = world.agree(lambda: load.build_skeleton(recipe, source, world))
    new_tokens = NewTokens.of(recipe.model, tokenizer)
    vocabulary_rows = model.get_input_embeddings().weight.shape[0]
    world.agree(lambda: check_vocabulary(tokenizer, vocabulary_rows, recipe.model.base, new_tokens.ids))
    new_tokens.enlarge(model)
    teacher = _Teacher.of(recipe, tokenizer, model, world, teacher_folder)
    teacher_network = teacher.network if teacher is not None else None
    adapted = world.agree(lambda: adapt.adapt(model, recipe.method, base, new_tokens))
    world.agree(lambda: pissa.check(adapted))
    network = Network(adapted, build_objective(recipe, teacher_network), recipe.training.neftune_alpha)
    # No weights are loaded yet: a model that does not fit is refused before minutes of loading.
    choice = world.agree(lambda: fit.choose(network, recipe, world, row_tokens(recipe), teacher_network))
    choice = fit.agree(choice, world)
    on_plan(choice.plan)

    if quantized:
        # The network above was only for the memory plan: its base is not in 4 bits.
        quantized_model = world.agree(lambda: load.load_quantized(recipe, source, world, model, new_tokens))
        adapted = adapt.adapt(quantized_model, recipe.method, base, new_tokens)
        network = Network(adapted, network.objective, recipe.training.neftune_alpha)
    network.head.chunk_numbers = choice.chunk_numbers
    if network.head.is_score:
        task.set_padding(network.base, pad_id(tokenizer))
    mesh = shard.build_mesh(recipe.distributed.strategy, world, recipe.distributed.collective_timeout_seconds)
    recompute_and_shard(network, recipe, choice.kind, mesh)
    fill.fill(
        adapted, recipe, source, world, tokenizer, adapter=adapter_source.adapter if adapter_source else None
    )
    if teacher is not None:
        teacher.fill(world, is_checked=is_checked)
    if not is_checked:
        _check_logits(network, parity.Subject.of(recipe), world)
    if recomputation.should_verify(choice.kind, recipe):
        if verdict is None or not verdict.matches(choice.kind, check_key):
            verdict = recomputation.verify(network, choice.kind, recipe, world, check_key)
        on_verdict(verdict)
        if verdict.kind != choice.kind:
            world.say(
                f"activation checkpointing {choice.kind} would change the gradients of this model: using {verdict.kind}"
            )
            recomputation.enable(network.model, verdict.kind)
            on_plan(fit.replace_recomputation(choice, verdict.kind, recipe, world, row_tokens(recipe)).plan)
    pissa.split_weights(adapted, world, load_initial)
    if recipe.training.compile:
        world.agree(lambda: shard.compile_layers(network))
    return network


def recompute_and_shard(network: Network, recipe: Recipe, recompute: Recomputation, mesh: DeviceMesh) -> None:
    """Enable activation checkpointing, and shard the network.

    Args:
        network: the network, with parameters on the meta device, or in 4 bits.
        recipe: the recipe.
        recompute: None, Selective or Full.
        mesh: the ranks.
    """
    training, quantized = recipe.training, recipe.method.type == "QLoRA"
    recomputation.enable(network.model, recompute, compiled=training.compile)
    shard.shard(network, mesh, training.precision, replicate_frozen=quantized)
    pissa.allocate_initial(network.model)


def _check_logits(network: Network, subject: parity.Subject, world: World) -> None:
    parity.check(network, world.device, subject, gather=world.gather)
    world.say(f"{subject} computes the same logits in training as in transformers")


def build_objective(recipe: Recipe, teacher: Network | None) -> Objective:
    """Return the objective of a recipe, with the teacher of a distillation."""
    spec = recipe.objective
    if spec.type == "SFT":
        return Sft(spec.label_smoothing or 0.0)
    if spec.type in COLUMNS_OF_OBJECTIVE:
        return _build_preference_objective(spec)
    if spec.distillation is not None and teacher is not None:
        return Distillation(spec.distillation, teacher)
    raise ValueError(f"objective {spec.type} has no loss")


def _build_preference_objective(spec: ObjectiveSpec) -> Objective:
    if spec.type == "DPO":
        dpo = spec.dpo or DpoSpec()
        return Ipo(dpo.beta) if dpo.loss == "IPO" else Dpo(dpo.beta, dpo.label_smoothing)
    if spec.type == "KTO":
        return Kto(spec.kto or KtoSpec())
    if spec.type == "ORPO":
        return Orpo((spec.orpo or OrpoSpec()).weight)
    if spec.type == "SimPO":
        simpo = spec.simpo or SimpoSpec()
        return Simpo(simpo.beta, simpo.gamma)
    return RewardModel((spec.reward_model or RewardModelSpec()).center_rewards_coefficient)


@dataclass(frozen=True)
class _Teacher:
    """The network of a teacher, its recipe (`build_teacher_recipe`), and the folder of its weights, which `fill` reads."""

    network: Network
    recipe: Recipe
    source: Path

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerBase,
        student: PreTrainedModel,
        world: World,
        folder: Path,
    ) -> _Teacher | None:
        """Return the recipe's teacher, without weights; None without a distillation. The teacher's vocabulary must be the student's."""
        if recipe.objective.distillation is None:
            return None
        teacher_recipe = build_teacher_recipe(recipe)
        teacher = teacher_recipe.model.base
        source = merge.fetch(teacher_recipe.model, folder, world, field=_TEACHER)

        def build_skeleton() -> PreTrainedModel:
            check_same_vocabulary(
                tokenizer, load_tokenizer(teacher_recipe.model, source.tokenizer), recipe.model.base, teacher
            )
            model = load.build_skeleton(teacher_recipe, source.base, world, field=_TEACHER)
            student_rows = student.config.get_text_config().vocab_size
            teacher_rows = model.config.get_text_config().vocab_size
            load.check_same_logits(student_rows, teacher_rows, recipe.model.base, teacher)
            return model

        model = world.agree(build_skeleton)
        return cls(Network(model.requires_grad_(False).eval(), TeacherStates()), teacher_recipe, source.base)

    def fill(self, world: World, *, is_checked: bool) -> None:
        """Shard the teacher over all ranks, read its weights, and check its logits unless an earlier attempt has done so.

        Raises:
            RecipeRefusedError: files are missing or damaged, or its logits are wrong (`parity.check`).
        """
        shard.shard(self.network, shard.build_mesh("FSDP", world), self.recipe.training.precision)
        fill.materialize(self.network, world.device)
        fill.read_weights(self.network.model, self.recipe.model, self.source, world, field_name=_TEACHER)
        if not is_checked:
            subject = replace(parity.Subject.of(self.recipe), field=_TEACHER, remedy="choose another teacher")
            _check_logits(self.network, subject, world)


def build_teacher_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe for the teacher: its own base, and no trained weights."""
    spec = recipe.objective.distillation
    assert spec is not None  # noqa: S101 - the caller checks it
    model = recipe.model.model_copy(
        update={
            "base": spec.teacher,
            "revision": spec.teacher_revision,
            "trust_remote_code": spec.teacher_trust_remote_code,
            "chat_template": None,
            "adapter": "Merge",
        }
    )
    # Method LoRA, because its base is frozen, and frozen weights have the precision of the computation.
    return recipe.model_copy(update={"model": model, "method": Method(type="LoRA")})
