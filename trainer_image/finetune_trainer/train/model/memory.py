"""Whether a job fits into the memory there is, before anything is loaded, and what it has to recompute to."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model import chunks

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.model.network import Network
    from finetune_trainer.train.runtime.distributed import World

# From the least recomputation to the most.
KINDS = ("None", "Selective", "Full")
# Share of a device's memory that allocators, collectives and fragments leave to us.
_USABLE = 0.92
_GIB = 2**30
_FOUR_BITS = 4.5 / 8
# Bytes a token and a layer keeps of its activations, in units of width x bytes a number, without attention's weights
# (as Korthikanti et al., arXiv:2205.05198, table 2, count them). Measured as what a Llama's forward pass leaves
# allocated (tests/unit/trainer/model/test_memory.py does it again): None 11 widths in fp32 and 13 in bf16, where norms work
# in fp32, and 4 of the feed-forward layer's; Selective 5 and 1, and with adapters' products about 10 and 1.3.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 6.0, "Full": 1.0}
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 2.0, "Full": 0.0}


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    layer: float
    """Gathered weights of the current layer, the next one and the root."""
    loss: float
    """A chunk of logits with its gradient, and the gradient of the output layer."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.layer + self.loss

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("gathered layers", self.layer),
            ("loss", self.loss),
        )
        listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts)
        return f"{self.total / _GIB:.1f} GiB a rank ({listed})"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that an estimate depends on."""

    parameters: int
    trained: int
    whole: int
    """Parameters that are not sharded: a four-bit base."""
    whole_bytes: float
    teacher: int
    """Parameters of the teacher on a rank: its shard, with one layer and the root gathered."""
    layers: int
    width: int
    feed_forward: int
    root: int
    """Parameters of the embedding and the output layer."""
    head: int = 0
    """Parameters of the output layer, where it is trained."""
    vocabulary: int = 0

    @classmethod
    def of(cls, network: Network, teacher: Network | None, *, quantised: bool, ranks: int = 1) -> Shape:
        """Return the sizes of a network before sharding, also on the meta device.

        Args:
            network: the network to train.
            teacher: of a distillation.
            quantised: whether frozen weights are in four bits, and unsharded on each rank.
            ranks: over which the teacher is sharded.
        """
        config = network.base.config.get_text_config()
        frozen = [weight for weight in network.base.parameters() if not weight.requires_grad]
        head = network.base.get_output_embeddings().weight
        return cls(
            parameters=sum(weight.numel() for weight in network.parameters()),
            trained=sum(weight.numel() for weight in network.parameters() if weight.requires_grad),
            whole=sum(weight.numel() for weight in frozen) if quantised else 0,
            whole_bytes=_stored_bytes(network) if quantised else 0,
            teacher=0 if teacher is None else _held_of_teacher(teacher, ranks),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            root=_root(network),
            head=head.numel() if head.requires_grad else 0,
            vocabulary=network.vocabulary,
        )


def _root(network: Network) -> int:
    embedding = network.base.get_input_embeddings().weight
    head = network.base.get_output_embeddings().weight
    return int(embedding.numel() + (0 if head is embedding else head.numel()))


def _held_of_teacher(teacher: Network, ranks: int) -> int:
    parameters = sum(weight.numel() for weight in teacher.parameters())
    layers: int = teacher.base.config.get_text_config().num_hidden_layers
    held = parameters // ranks + 2 * (parameters - _root(teacher)) // max(1, layers) + _root(teacher)
    return int(held)


def _stored_bytes(network: Network) -> float:
    """Return the bytes of a frozen base in four bits; on the meta device, after quantisation.

    Four bits a number and an fp32 constant every 64, which double quantisation makes less (Dettmers et al.,
    arXiv:2305.14314, section 3); the embedding and the output layer are not quantised.
    """
    head = network.base.get_output_embeddings().weight
    products = {id(module.weight) for module in network.base.modules() if isinstance(module, nn.Linear)} - {
        id(head)
    }
    stored = 0.0
    for weight in network.base.parameters():
        if not weight.requires_grad:
            pending = weight.is_meta and id(weight) in products
            stored += weight.numel() * (_FOUR_BITS if pending else weight.element_size())
    return stored


def estimate(shape: Shape, recipe: Recipe, *, shards: int, row_tokens: int, recompute: str) -> Estimate:
    """Estimate the peak memory of one rank.

    Trained weights are fp32, with an fp32 gradient and two fp32 moments of AdamW; frozen weights have the
    dtype that they compute in.

    Args:
        shape: the model.
        recipe: precision, method and batch size.
        shards: number of ranks over which parameters are sharded.
        row_tokens: tokens per row of a batch.
        recompute: None, Selective or Full.
    """
    compute = 2 if recipe.training.precision == "BF16" else 4
    frozen = shape.parameters - shape.trained - shape.whole
    tokens = recipe.training.per_device_batch_size * row_tokens
    kept = (
        shape.layers
        * tokens
        * compute
        * (_ATTENTION_WIDTHS[recompute] * shape.width + _FEED_FORWARD_WIDTHS[recompute] * shape.feed_forward)
    )
    # The backward pass recomputes one layer in full.
    working = (
        tokens
        * compute
        * (_ATTENTION_WIDTHS["None"] * shape.width + _FEED_FORWARD_WIDTHS["None"] * shape.feed_forward)
    )
    root = 0 if shape.whole else shape.root
    a_layer = (shape.parameters - shape.whole - root) / max(1, shape.layers)
    reduced = 4 * root if shape.head else 0
    chunk = min(chunks.CHUNK_NUMBERS, tokens * shape.vocabulary)
    return Estimate(
        weights=(4 * shape.trained + compute * frozen) / shards + compute * shape.teacher + shape.whole_bytes,
        gradients=4 * shape.trained / shards,
        optimizer=8 * shape.trained / shards,
        activations=kept + working,
        layer=compute * (2 * a_layer + 2 * root) + reduced,
        loss=3 * 4 * chunk + (4 + compute) * shape.head,
    )


def available(world: World) -> float:
    """Return the memory limit of one rank in bytes: of its GPU, or its share of the pod's."""
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
    """Choose the activation checkpointing: the recipe's, or for Auto the least that fits; logs the estimate.

    Raises:
        RecipeRefusedError: the job does not fit; the message has the numbers, and what would fit.
    """
    shape = Shape.of(network, teacher, quantised=recipe.method.type == "QLoRA", ranks=world.size)
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
    """Describe the smallest changes of the recipe that make the estimate fit."""
    training, found = recipe.training, []

    def fits(shards: int, *, shape: Shape = shape, batch_size: int = training.per_device_batch_size) -> bool:
        changed = recipe.model_copy(
            update={"training": training.model_copy(update={"per_device_batch_size": batch_size})}
        )
        need = estimate(shape, changed, shards=shards, row_tokens=row_tokens, recompute="Full")
        return need.total <= limit

    shards = _shards(recipe, world)
    if fits(shards):
        return "what would fit: training.activationCheckpointing Full (or Auto)"
    if training.per_device_batch_size > 1 and fits(shards, batch_size=1):
        found.append("training.perDeviceBatchSize 1 with activationCheckpointing Full")
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
    """Return the shape of the model with an adapter of about a hundredth of its parameters."""
    return replace(shape, trained=shape.parameters // 100)
