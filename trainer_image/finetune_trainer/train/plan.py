"""`finetune-train --plan`: one step of a recipe on fake tensors, for its memory and its collectives, without weights or GPUs.

The step is the real one: the model is adapted, sharded, run forward and backward, clipped and updated by the code of the
training, over a process group that sends nothing. docs/design/speed.md lists what this cannot show.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune_trainer.models import download
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod import spec_rules
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train import build, graphs
from finetune_trainer.train.data import pack
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.loop import take_step
from finetune_trainer.train.model import precision, shard
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.memory import accounting, fit
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.optimizer import compact_adamw
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.weights import fill, load
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from finetune_trainer.train.runtime.recipe import load_recipe, row_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation

_GIB = 2**30
# The GPU if the recipe names none; the name of a product has the size of its memory.
_DEFAULT_PRODUCT = "NVIDIA-H100-80GB-HBM3"
_PRODUCT_MEMORY = re.compile(r"(\d+)GB")
# A slice of a GPU, in the name of a product or of a resource.
_SLICE_MEMORY = re.compile(r"mig-\d+g\.(\d+)gb", re.IGNORECASE)
# The compute capability of older GPUs, which have no instructions for BF16 (https://developer.nvidia.com/cuda-legacy-gpus).
_OLD_CAPABILITIES = {"P100": (6, 0), "P40": (6, 1), "P4": (6, 1), "V100": (7, 0), "T4": (7, 5)}
_OLD_PRODUCT = re.compile(rf"\b({'|'.join(_OLD_CAPABILITIES)})\b")
# Stands for all other GPUs, which have these instructions.
_NEWER_CAPABILITY = (9, 0)
# NB: the CPU builds of torch cannot compute gradients of fake tensors that claim to be on a GPU (2.13).
_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """The memory and traffic of one step of one rank.

    peak: peak memory in bytes, by `accounting.KINDS`.
    traffic: the collectives on the device, by kind.
    waits: operations for which the CPU waits for the GPU.
    """

    peak: dict[str, int]
    traffic: dict[str, accounting.Traffic]
    waits: list[str]

    @property
    def total(self) -> int:
        """Peak memory in bytes."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Plan:
    """A planned step, and the estimate that the trainer makes before it loads weights."""

    step: Step
    choice: fit.Choice
    world: World
    graphs: tuple[int, int] | None = None
    """Graphs of training.compile, and kinds of layers; None without training.compile."""

    def lines(self) -> list[str]:
        """Return the plan for people to read."""
        step, choice = self.step, self.choice
        kinds = ", ".join(f"{kind} {size / _GIB:.1f}" for kind, size in step.peak.items())
        collectives = [
            f"{name}: {each.count} a step, {each.size / _GIB:.2f} GiB" for name, each in step.traffic.items()
        ]
        fits = "fits" if step.total <= choice.limit else "does not fit"
        ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        graph_lines = []
        if self.graphs is not None:
            count, layer_kinds = self.graphs
            graph_lines = [
                f"graphs over 20 packs of different lengths: {count}, kinds of layers: {layer_kinds}"
            ]
        return [
            f"{ranks}, activation checkpointing {choice.kind}, {choice.describe_chunk()}",
            f"peak memory of a rank: {step.total / _GIB:.1f} GiB ({kinds})",
            f"estimate without a plan: {choice.estimate}",
            f"memory of a rank: {choice.limit / _GIB:.1f} GiB: {fits}",
            *(collectives or ["collectives: none"]),
            f"waits for the GPU in a step: {len(step.waits)}",
            *graph_lines,
        ]


def print_plan(*, config: Path | None, gpu_memory: float | None) -> None:
    """Plan the recipe of the environment, and print the plan.

    Args:
        config: folder of the model's config.json; None: the config of model.base is fetched.
        gpu_memory: memory of a GPU in GiB; None: by the names in distributed.gpu, or the name of the default GPU.

    Raises:
        RecipeRefusedError: the recipe violates rules of FineTuneJob.spec, or its step cannot be planned.
    """
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    recipe = load_recipe()
    spec_rules.check(recipe)
    card = _choose_card(recipe, gpu_memory)
    precision.check(recipe, card)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        model = recipe.model
        source = config or download.fetch_config(
            model.base, Path(folder), revision=model.revision, cache=Cache.of(model)
        )
        plan = plan_step(recipe, source, card)
        if recipe.training.compile:
            plan = replace(plan, graphs=graphs.count_graphs(recipe, source, card))
        print("\n".join(plan.lines()), flush=True)


def _choose_card(recipe: Recipe, gpu_memory: float | None) -> Card:
    """Return the GPU of the recipe, or else of _DEFAULT_PRODUCT; its name shows its capability and, without `gpu_memory`, its memory."""
    gpu = recipe.distributed.gpu
    product = (gpu.product if gpu else None) or _DEFAULT_PRODUCT
    resource = (gpu.resource_name if gpu else None) or ""
    if gpu_memory is None:
        memory_match = _SLICE_MEMORY.search(f"{resource} {product}") or _PRODUCT_MEMORY.search(product)
        if memory_match is None:
            raise RecipeRefusedError(
                f"cannot derive the GPU memory from the name {product}: add --gpu-memory GIB"
            )
        gpu_memory = float(memory_match[1])
    old_product = _OLD_PRODUCT.search(product)
    capability = _OLD_CAPABILITIES[old_product[1]] if old_product else _NEWER_CAPABILITY
    return Card(product, int(gpu_memory * _GIB), capability)


def plan_step(recipe: Recipe, source: Path, card: Card) -> Plan:
    """Plan one step of rank 0.

    Args:
        recipe: the recipe; its `distributed` has the number of ranks.
        source: folder of the base model's config.
        card: the GPU of each rank.

    Raises:
        RecipeRefusedError: the model cannot be loaded or adapted, or its step cannot be planned.
    """
    if recipe.objective.type == "Distillation":
        raise RecipeRefusedError(
            "--plan does not support objective Distillation, which has a second model: plan the recipe with objective SFT"
        )
    if recipe.objective.type == "RewardModel" and recipe.method.type == "QLoRA":
        # NB: torch cannot swap the frozen score head for a fake one, because its converter has a weak reference to it (2.13).
        raise RecipeRefusedError(
            "--plan does not support objective RewardModel with method QLoRA: plan the recipe with method LoRA"
        )
    spec = recipe.distributed
    world = World(
        rank=0, size=spec.ranks, local_rank=0, local_size=spec.ranks_per_node, device=_DEVICE, card=card
    )
    with _fake_process_group(world.size):
        mesh = shard.build_mesh(spec.strategy, world)
        network = _build_skeleton(recipe, source, world)
        choice = fit.decide(network, recipe, world, row_tokens(recipe), teacher=None)
        # NB: a skeleton is not fake: its weights are on the meta device, its buffers real.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        if recipe.method.type == "QLoRA":
            # As in training, the choice is made before the base is quantized.
            network = _build_quantized(recipe, source, world, fake)
        network.head.chunk_numbers = choice.chunk_numbers
        return Plan(measure_step(network, recipe, mesh, choice.kind, fake), choice, world)


@contextmanager
def _fake_process_group(size: int) -> Iterator[None]:
    """Create a process group that sends nothing, with this process as rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _build_skeleton(recipe: Recipe, source: Path, world: World) -> Network:
    model = load.build_skeleton(recipe, source, world)
    adapted = adapt.adapt(model, recipe.method, recipe.model.base, _add_new_tokens(recipe, model))
    return Network(adapted, build.build_objective(recipe, None), recipe.training.neftune_alpha)


def _add_new_tokens(recipe: Recipe, model: PreTrainedModel) -> NewTokens:
    """Add rows for the new tokens: a plan has no tokenizer, so their ids follow the last id of the embedding."""
    rows = len(model.get_input_embeddings().weight)
    new = NewTokens(tuple(range(rows, rows + len(recipe.model.new_tokens))))
    new.enlarge(model)
    return new


def _build_quantized(recipe: Recipe, source: Path, world: World, fake: FakeTensorMode) -> Network:
    """Build a network with a 4-bit base, which bitsandbytes quantizes from fake weights."""
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn.modules import Linear4bit
    from transformers.integrations import replace_with_bnb_linear

    model: Any = load.build_skeleton(recipe, source, world)
    new = _add_new_tokens(recipe, model)
    head = task.get_output_layer(model)
    excluded_modules = [name for name, module in model.named_modules() if module is head]
    config = load.build_quantization_config(recipe)
    replace_with_bnb_linear(model, excluded_modules, config)
    model.is_loaded_in_4bit = True
    # NB: bitsandbytes computes its tables once, from values that fake tensors do not have: so it computes them before `fake` is entered.
    quantize_4bit(torch.zeros(64, 64), compress_statistics=True)
    adapted = adapt.adapt(model.requires_grad_(False), recipe.method, recipe.model.base, new)
    with fake:
        for module in adapted.modules():
            if isinstance(module, Linear4bit):
                load.prevent_repacking(module)
                packed, state = quantize_4bit(
                    torch.empty(module.out_features, module.in_features, dtype=model.dtype),
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
                # NB: a buffer, because a parameter that is already a fake tensor cannot be moved to its device.
                module.register_parameter("weight", None)
                del module.weight
                module.register_buffer("weight", packed)
                packed.quant_state = state
    return Network(adapted, build.build_objective(recipe, None), recipe.training.neftune_alpha)


def measure_step(
    network: Network, recipe: Recipe, mesh: DeviceMesh, recompute: Recomputation, fake: FakeTensorMode
) -> Step:
    """Take one step on fake tensors, and return its memory and traffic.

    Args:
        network: with parameters on the meta device, or fake ones.
        recipe: the recipe.
        mesh: the ranks.
        recompute: None, Selective or Full.
        fake: makes fake tensors.

    Raises:
        RecipeRefusedError: the step depends on values, which fake tensors do not have.
    """
    # NB: the tables of 8-bit codes are computed once, from values that fake tensors do not have, so before `fake` is entered.
    if recipe.training.optimizer.type == "AdamW8bit":
        compact_adamw.compute_code_values(signed=True)
        compact_adamw.compute_code_values(signed=False)
    with fake:
        build.recompute_and_shard(network, recipe, recompute, mesh)
        fill.materialize(network, _DEVICE)
        optimizer = Optimizer(network, recipe.training, max_steps=1)
        batches = [_make_fake(batch, fake) for batch in make_full_batches(recipe)]
        account = accounting.Accounting(_DEVICE)
        with account:
            account.set_kind("parameters", _iterate_persistent_tensors(network))
            network.register_forward_hook(lambda *_: account.set_default_kind("activations"))
            # All gradients exist when the first of the optimizers steps.
            first_optimizer, *_ = optimizer.parts
            first_optimizer.register_step_pre_hook(
                lambda *_: account.set_kind("gradients", _list_gradients(network))
            )
            try:
                take_step(network, optimizer, batches, step=0, count=1.0, add_batch=lambda *_: None)
            except DataDependentOutputException as error:
                raise RecipeRefusedError(
                    f"a step of {recipe.model.base} needs a value from the GPU ({error.func}), so it cannot be planned"
                ) from error
            account.set_kind("optimizer", _list_optimizer_states(optimizer))
            account.set_kind("gathered", _iterate_gathered_parameters(network))
    return Step(account.compute_peak(), account.traffic, account.waits)


def make_full_batches(recipe: Recipe) -> list[pack.Batch]:
    """Return the batches of a step in which each row is full, and each token except a document's first is a target."""
    training = recipe.training
    # Documents of an example: two if the objective compares answers, else one.
    documents = row_tokens(recipe) // training.max_length
    examples = training.per_device_batch_size * training.gradient_accumulation
    offsets = np.arange(examples * documents + 1, dtype=np.int64) * training.max_length
    split = Split(
        np.zeros(offsets[-1], np.int32),
        np.ones(offsets[-1], bool),
        offsets,
        documents=documents,
        reference=np.zeros((examples, 2), np.float32) if documents == 2 else None,
        labels=np.arange(examples) % 2 == 0 if documents == 2 else None,
    )
    rows = [[example] for example in range(examples)]
    size = training.per_device_batch_size
    return [pack.collate(split, rows[begin : begin + size], pad_id=0) for begin in range(0, examples, size)]


def _make_fake(batch: pack.Batch, fake: FakeTensorMode) -> pack.Batch:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    faked: dict[str, Any] = {name: fake.from_tensor(value) for name, value in tensors.items()}
    return replace(batch, **faked)


def _iterate_persistent_tensors(network: Network) -> Iterator[torch.Tensor]:
    """Yield the tensors that a network keeps between steps."""
    yield from network.parameters()
    yield from network.buffers()
    # A 4-bit weight is a buffer, see `_build_quantized`. Its quantization state has tensors; `state2` is that of double quantization.
    for weight in network.buffers():
        state = getattr(weight, "quant_state", None)
        for each_state in (state, getattr(state, "state2", None)):
            attributes = {} if each_state is None else vars(each_state)
            yield from (value for value in attributes.values() if isinstance(value, torch.Tensor))


def _list_gradients(network: Network) -> list[torch.Tensor]:
    return [weight.grad for weight in network.parameters() if weight.grad is not None]


def _list_optimizer_states(optimizer: Optimizer) -> list[torch.Tensor]:
    states = [state for part in optimizer.parts for state in part.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _iterate_gathered_parameters(network: Network) -> Iterator[torch.Tensor]:
    """Yield the buffers into which FSDP gathers parameters."""
    for module in shard.find_fsdp_modules(network):
        group = module._get_fsdp_state()._fsdp_param_group  # noqa: SLF001 - where FSDP keeps them
        for parameter in group.fsdp_params if group is not None else ():
            yield from parameter.all_gather_outputs
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.unsharded_param
