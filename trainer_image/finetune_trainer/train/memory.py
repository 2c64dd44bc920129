"""Whether a job fits into the memory there is, before anything is loaded, and what it has to recompute to."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.distributed import World
    from finetune_trainer.train.network import Network

# From the least recomputation to the most.
KINDS = ("None", "Selective", "Full")
# Share of a device's memory that allocators, collectives and fragments leave to us.
_USABLE = 0.92
_GIB = 2**30
# Bytes a token and a layer keeps of its activations, in units of width x bytes a number, without attention's weights
# (as Korthikanti et al., arXiv:2205.05198, table 2, count them). Measured as what a Llama's forward pass leaves
# allocated (tests/unit/train/test_memory.py does it again): None 11 widths in fp32 and 13 in bf16, where norms work
# in fp32, and 4 of the feed-forward layer's; Selective 5 and 1, and with adapters' products about 10 and 1.3.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 6.0, "Full": 1.0}
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 2.0, "Full": 0.0}


@dataclass(frozen=True)
class Estimate:
    """What one rank holds at its peak, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    layer: float
    """The weights that are gathered for the layer at work and the next one, and the output layer's."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.layer

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("gathered layers", self.layer),
        )
        told = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts)
        return f"{self.total / _GIB:.1f} GiB a rank ({told})"


@dataclass(frozen=True)
class Shape:
    """What an estimate needs to know of a model."""

    parameters: int
    trained: int
    whole: int
    """Parameters that are not sharded: a four-bit base."""
    whole_bytes: int
    teacher: int
    layers: int
    width: int
    feed_forward: int
    root: int
    """Parameters of the embedding and the output layer."""

    @classmethod
    def of(cls, network: Network, teacher: Network | None, *, quantised: bool) -> Shape:
        """The shape of a network before it is sharded."""
        config = network.base.config.get_text_config()
        weights = list(network.base.parameters())
        frozen = [weight for weight in weights if not weight.requires_grad] if quantised else []
        embedding = network.base.get_input_embeddings().weight
        head = network.base.get_output_embeddings().weight
        return cls(
            parameters=sum(weight.numel() for weight in network.parameters()),
            trained=sum(weight.numel() for weight in network.parameters() if weight.requires_grad),
            whole=sum(weight.numel() for weight in frozen),
            whole_bytes=sum(weight.numel() * weight.element_size() for weight in frozen),
            teacher=sum(weight.numel() for weight in teacher.parameters()) if teacher is not None else 0,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            root=embedding.numel() + (0 if head is embedding else head.numel()),
        )


def estimate(shape: Shape, recipe: Recipe, *, shards: int, row_tokens: int, recompute: str) -> Estimate:
    """What one rank holds at its peak.

    Trained weights are fp32, with an fp32 gradient and two fp32 moments of AdamW; frozen ones have the precision
    they compute in.

    Args:
        shape: the model.
        recipe: precision, method and batch size.
        shards: over how many ranks parameters are sharded.
        row_tokens: tokens in a row of a batch.
        recompute: None, Selective or Full.
    """
    compute = 2 if recipe.training.precision == "BF16" else 4
    frozen = shape.parameters - shape.trained - shape.whole
    tokens = recipe.training.batch_size * row_tokens
    kept = (
        shape.layers
        * tokens
        * compute
        * (_ATTENTION_WIDTHS[recompute] * shape.width + _FEED_FORWARD_WIDTHS[recompute] * shape.feed_forward)
    )
    # One layer is computed in full in any case.
    working = (
        tokens
        * compute
        * (_ATTENTION_WIDTHS["None"] * shape.width + _FEED_FORWARD_WIDTHS["None"] * shape.feed_forward)
    )
    a_layer = (shape.parameters - shape.whole - shape.root) / max(1, shape.layers)
    return Estimate(
        weights=(4 * shape.trained + compute * (frozen + shape.teacher)) / shards + shape.whole_bytes,
        gradients=4 * shape.trained / shards,
        optimizer=8 * shape.trained / shards,
        activations=kept + working,
        layer=compute * (2 * a_layer + (0 if shape.whole else 2 * shape.root)),
    )


def available(world: World) -> float:
    """The memory that one rank may use, in bytes: of its GPU, or its share of the pod's."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    limits = []
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")))
    return min(limits) / world.local_size if limits else float("inf")


def choose(network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None) -> str:
    """What to recompute: as the recipe says, or for Auto the least that fits; the estimate is logged.

    Raises:
        RecipeRefusedError: even so it cannot fit; the sentence has the numbers, and what would fit.
    """
    shape = Shape.of(network, teacher, quantised=recipe.method.type == "QLoRA")
    asked = recipe.training.activation_checkpointing
    kinds = KINDS if asked == "Auto" else (asked,)
    shards = _shards(recipe, world)
    limit = available(world) * _USABLE
    for kind in kinds:
        found = estimate(shape, recipe, shards=shards, row_tokens=row_tokens, recompute=kind)
        if found.total <= limit or kind == kinds[-1]:
            break
    world.say(f"memory: about {found} of {limit / _GIB:.1f} GiB; activation checkpointing {kind}")
    if found.total > limit:
        raise RecipeRefusedError(
            f"the job needs about {found} and a rank has {limit / _GIB:.1f} GiB: "
            + _what_would_fit(shape, recipe, world, row_tokens, limit),
            reason="OutOfMemory",
        )
    return kind


def _shards(recipe: Recipe, world: World) -> int:
    return {"FSDP": world.size, "HSDP": world.local_size, "DDP": 1}[recipe.distributed.strategy]


def _what_would_fit(shape: Shape, recipe: Recipe, world: World, row_tokens: int, limit: float) -> str:
    """The nearest changes of the recipe with which the estimate fits."""
    training, found = recipe.training, []

    def fits(shards: int, *, shape: Shape = shape, batch_size: int = training.batch_size) -> bool:
        changed = recipe.model_copy(
            update={"training": training.model_copy(update={"batch_size": batch_size})}
        )
        need = estimate(shape, changed, shards=shards, row_tokens=row_tokens, recompute="Full")
        return need.total <= limit

    shards = _shards(recipe, world)
    if fits(shards):
        return "what would fit: training.activationCheckpointing Full (or Auto)"
    if training.batch_size > 1 and fits(shards, batch_size=1):
        found.append("training.batchSize 1 with activationCheckpointing Full")
    if recipe.distributed.strategy != "FSDP" and fits(world.size):
        found.append("distributed.strategy FSDP")
    ranks = world.size
    while ranks <= 1024 * world.size:
        ranks *= 2
        if fits(ranks):
            found.append(f"{ranks} ranks with FSDP")
            break
    if recipe.method.type == "Full" and fits(shards, shape=_adapted(shape)):
        found.append("method LoRA")
    return (
        f"what would fit: {'; '.join(found)}" if found else "use a smaller model, or lower training.maxLength"
    )


def _adapted(shape: Shape) -> Shape:
    """The shape of the same model under an adapter, which is about a hundredth of it."""
    return replace(shape, trained=shape.parameters // 100)
