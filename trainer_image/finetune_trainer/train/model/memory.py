"""Whether a job fits into the memory there is, before anything is loaded, and what it has to recompute to."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from finetune_crds.contract import MemoryPlan
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model import chunks, muon, pissa, precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_crds.training import Training
    from finetune_trainer.train.model.network import Network
    from finetune_trainer.train.runtime.distributed import World

# From the least recomputation to the most.
KINDS: tuple[Recomputation, ...] = ("None", "Selective", "Full")
# Share of a device's memory that allocators, collectives and fragments leave to us.
_USABLE = 0.92
_GIB = 2**30
_FOUR_BITS = 4.5 / 8
# Two codes of a byte, and an fp32 scale of each for 256 of them.
_EIGHT_BITS = 2 * (1 + 4 / 256)
# What a Full run may change of its optimizer to need less.
_SMALLER: tuple[dict[str, str], ...] = ({"type": "AdamW8bit"}, {"type": "AdamW8bit", "weights": "BF16"})
# Bytes a token and a layer keeps of its activations, in units of width x bytes a number, without attention's weights
# (as Korthikanti et al., arXiv:2205.05198, table 2, count them). Measured as what a Llama's forward pass leaves
# allocated (tests/unit/trainer/model/test_memory.py does it again): None 11 widths in fp32 and 13 in bf16, where norms work
# in fp32, and 4 of the feed-forward layer's; Selective 5 and 1. With adapters, whose products are matrix products too, a planned
# Llama 3.1 8B keeps 6 and 2.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 5.0, "Full": 1.0}
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 1.0, "Full": 0.0}
_OF_ADAPTERS = {"None": 0.0, "Selective": 1.0, "Full": 0.0}


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank when it needs most, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    layer: float
    """Gathered weights of the current layer, the next one and the root, and the root's gradient while it is reduced."""
    loss: float
    """Logits of a chunk with their gradient, and the gradient of the output layer."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.layer + self.loss

    def __str__(self) -> str:
        named = {"layer": "gathered layers"}
        listed = ", ".join(
            f"{named.get(name, name)} {size / _GIB:.1f}" for name, size in asdict(self).items()
        )
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
    root_trained: int = 0
    """Those of them that are trained."""
    copied: int = 0
    """Numbers of a copy of the embedding, into which peft puts the trained rows of new tokens, and of its gradient."""
    head: int = 0
    """Parameters of the output layer, where it is trained."""
    vocabulary: int = 0
    matrices: int = 0
    """Trained parameters in matrices of the layers, which Muon takes."""
    initial: int = 0
    """Numbers of what layers of PiSSA began as, in fp32."""

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
        embedding, head = network.base.get_input_embeddings(), network.head_parameters
        ends = _ends(network)
        return cls(
            parameters=sum(weight.numel() for weight in network.parameters()),
            trained=sum(weight.numel() for weight in network.parameters() if weight.requires_grad),
            whole=sum(weight.numel() for weight in frozen) if quantised else 0,
            whole_bytes=_stored_bytes(network) if quantised else 0,
            teacher=0 if teacher is None else _held_of_teacher(teacher, ranks),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            feed_forward=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            root=sum(weight.numel() for weight in ends),
            root_trained=sum(weight.numel() for weight in ends if weight.requires_grad),
            copied=2 * embedding.token_adapter.base_layer.weight.numel()
            if hasattr(embedding, "token_adapter")
            else 0,
            head=sum(weight.numel() for weight in head if weight.requires_grad),
            vocabulary=network.vocabulary,
            matrices=sum(weight.numel() for weight in muon.matrices(network)),
            initial=pissa.size(network.model),
        )


def _ends(network: Network) -> list[nn.Parameter]:
    """The parameters of the embedding and the output layer; tied ones once."""
    both = (*network.base.get_input_embeddings().parameters(), *network.head_parameters)
    return list({id(weight): weight for weight in both}.values())


def _held_of_teacher(teacher: Network, ranks: int) -> int:
    parameters = sum(weight.numel() for weight in teacher.parameters())
    layers: int = teacher.base.config.get_text_config().num_hidden_layers
    root = sum(weight.numel() for weight in _ends(teacher))
    held = parameters // ranks + 2 * (parameters - root) // max(1, layers) + root
    return int(held)


def _stored_bytes(network: Network) -> float:
    """Return the bytes of a frozen base in four bits; on the meta device, after quantisation.

    Four bits a number and an fp32 constant every 64, which double quantisation makes less (Dettmers et al.,
    arXiv:2305.14314, section 3); the embedding and the output layer are not quantised.
    """
    products = {id(module.weight) for module in network.base.modules() if isinstance(module, nn.Linear)} - {
        id(weight) for weight in network.head_parameters
    }
    stored = 0.0
    for weight in network.base.parameters():
        if not weight.requires_grad:
            pending = weight.is_meta and id(weight) in products
            stored += weight.numel() * (_FOUR_BITS if pending else weight.element_size())
    return stored


def estimate(shape: Shape, recipe: Recipe, *, shards: int, row_tokens: int, recompute: str) -> Estimate:
    """Estimate the peak memory of one rank: in the loss, at the start of the backward pass, or at its end.

    Trained weights and their gradients are fp32 or bf16, with the moments of their optimizer; frozen weights have the
    dtype that they compute in. tests/long/trainer/test_plans.py compares this with planned steps.

    Args:
        shape: the model.
        recipe: precision, method and batch size.
        shards: number of ranks over which parameters are sharded.
        row_tokens: tokens per row of a batch.
        recompute: None, Selective or Full.
    """
    compute = precision.compute(recipe.training.precision).itemsize
    trained = precision.trained(recipe.training).itemsize
    frozen = shape.parameters - shape.trained - shape.whole
    tokens = recipe.training.per_device_batch_size * row_tokens
    kept = activations(shape, tokens, compute, recompute)
    # The backward pass recomputes one layer in full.
    working = activations(shape, tokens, compute, "None") / max(1, shape.layers)
    root = shape.root_trained if shape.whole else shape.root
    a_layer = (shape.parameters - shape.whole - root) / max(1, shape.layers)
    a_trained_layer = (shape.trained - shape.root_trained) / max(1, shape.layers)
    chunk = min(chunks.CHUNK_NUMBERS, tokens * shape.vocabulary)
    held = Estimate(
        weights=(trained * shape.trained + compute * frozen + 4 * shape.initial) / shards
        + compute * shape.teacher
        + shape.whole_bytes,
        gradients=0,
        optimizer=_moments(shape, recipe) / shards,
        activations=0,
        layer=compute * (root + shape.copied),
        loss=0,
    )
    # FSDP frees a group's gathered weights, and then copies its gradients into a buffer in fp32.
    reduced = max(compute * root, (compute + 4) * shape.root_trained) + compute * shape.copied
    return max(
        replace(
            held,
            activations=kept,
            layer=held.layer + compute * a_layer,
            loss=3 * 4 * chunk + (4 + compute) * shape.head,
        ),
        replace(
            held,
            gradients=(compute + 4) * a_trained_layer,
            activations=kept + working,
            layer=held.layer + 2 * compute * a_layer,
            loss=compute * shape.head,
        ),
        replace(held, gradients=trained * shape.trained / shards, layer=reduced),
        key=lambda moment: moment.total,
    )


def activations(shape: Shape, tokens: int, compute: int, recompute: str) -> float:
    """Return the bytes of activations that a forward pass of all layers keeps for the backward pass.

    Args:
        shape: the model.
        tokens: in a batch.
        compute: bytes of a number.
        recompute: None, Selective or Full.
    """
    more = _OF_ADAPTERS[recompute] if shape.trained < shape.parameters else 0.0
    widths = (_ATTENTION_WIDTHS[recompute] + more) * shape.width
    widths += (_FEED_FORWARD_WIDTHS[recompute] + more) * shape.feed_forward
    return shape.layers * tokens * compute * widths


def _moments(shape: Shape, recipe: Recipe) -> float:
    """Return the bytes of what the optimizer keeps of all trained weights: two fp32 moments of each in AdamW, one in Muon."""
    kind = recipe.training.optimizer.type
    if kind == "Muon":
        return 4 * shape.matrices + 8 * (shape.trained - shape.matrices)
    return (_EIGHT_BITS if kind == "AdamW8bit" else 8) * shape.trained


def staged(shape: Shape, recipe: Recipe, *, shards: int) -> float:
    """Return the bytes of the host for the copy of what a rank trains, from which asynchronous checkpoints are written."""
    if recipe.checkpoint is None or recipe.checkpoint.mode != "Async":
        return 0.0
    trained: int = precision.trained(recipe.training).itemsize
    return (trained * shape.trained + 4 * shape.initial + _moments(shape, recipe)) / shards


def available(world: World) -> float:
    """Return the memory limit of one rank in bytes: of its GPU, or its share of the pod's."""
    if world.card is not None:
        return float(world.card.memory)
    limits = []
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")))
    return min(limits) / world.local_size if limits else float("inf")


@dataclass(frozen=True)
class Choice:
    """How a job uses the memory of a rank.

    kind: the activation checkpointing, one of KINDS.
    estimate: what it then needs.
    limit: the bytes that a rank may use.
    shape: the model that this is of.
    staged: bytes of the host for checkpoints, which are no part of the estimate.
    """

    kind: Recomputation
    estimate: Estimate
    limit: float
    shape: Shape
    staged: float

    @property
    def plan(self) -> MemoryPlan:
        """The choice as the MLflow run has it."""
        return MemoryPlan(
            activation_checkpointing=self.kind,
            memory_bytes=int(self.estimate.total),
            limit_bytes=int(self.limit) if math.isfinite(self.limit) else None,
            staged_bytes=int(self.staged),
            parameters=self.shape.parameters,
            trained_parameters=self.shape.trained,
            parts={name: int(size) for name, size in asdict(self.estimate).items()},
        )


def decide(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Choose the activation checkpointing: the recipe's, or for Auto the least that fits, or else the most there is."""
    shape = Shape.of(network, teacher, quantised=recipe.method.type == "QLoRA", ranks=world.size)
    asked = recipe.training.activation_checkpointing
    kinds = KINDS if asked == "Auto" else (asked,)
    shards = _shards(recipe, world)
    limit = available(world) * _USABLE
    for kind in kinds:
        found = estimate(shape, recipe, shards=shards, row_tokens=row_tokens, recompute=kind)
        if found.total <= limit or kind == kinds[-1]:
            break
    return Choice(kind, found, limit, shape, staged(shape, recipe, shards=shards))


def choose(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Decide, and log it.

    Raises:
        RecipeRefusedError: the job does not fit; the message has the numbers, and what would fit.
    """
    choice = decide(network, recipe, world, row_tokens, teacher)
    limit = choice.limit
    world.say(
        f"memory: about {choice.estimate} of {limit / _GIB:.1f} GiB; activation checkpointing {choice.kind}"
    )
    if choice.staged:
        where = f"{'pinned ' if world.card else ''}memory of the host"
        world.say(f"asynchronous checkpoints: a copy of {choice.staged / _GIB:.1f} GiB a rank in {where}")
    if choice.estimate.total > limit:
        raise RecipeRefusedError(
            f"the job needs about {choice.estimate} and a rank has {limit / _GIB:.1f} GiB: "
            + _what_would_fit(choice.shape, recipe, world, row_tokens, limit),
            reason="OutOfMemory",
        )
    return choice


def _shards(recipe: Recipe, world: World) -> int:
    return {"FSDP": world.size, "HSDP": world.local_size, "DDP": 1}[recipe.distributed.strategy]


def _what_would_fit(shape: Shape, recipe: Recipe, world: World, row_tokens: int, limit: float) -> str:
    """Describe the smallest changes of the recipe that make the estimate fit."""
    training, found = recipe.training, []

    def fits(
        shards: int,
        *,
        shape: Shape = shape,
        training: Training = training,
        batch_size: int = training.per_device_batch_size,
    ) -> bool:
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
    if recipe.method.type == "Full":
        found += _smaller_states(recipe, lambda training: fits(shards, training=training))
    if recipe.method.type == "Full" and fits(shards, shape=_adapted(shape), training=_plain(training)):
        found.append("method LoRA")
    return (
        f"what would fit: {'; '.join(found)}" if found else "use a smaller model, or lower training.maxLength"
    )


def _smaller_states(recipe: Recipe, fits: Callable[[Training], bool]) -> list[str]:
    """Describe the optimizer with less memory that fits, if one does: first without a change of the weights' precision."""
    for fields in _SMALLER if recipe.training.precision == "BF16" else _SMALLER[:1]:
        spec = recipe.training.optimizer.model_copy(update={**fields, "momentum": None})
        if fits(recipe.training.model_copy(update={"optimizer": spec})):
            listed = " with ".join(f"{name} {value}" for name, value in fields.items())
            without = " without momentum" if recipe.training.optimizer.momentum is not None else ""
            return [f"training.optimizer.{listed}{without}"]
    return []


def _plain(training: Training) -> Training:
    """Return the hyperparameters with the optimizer's defaults, which adapters take."""
    return training.model_copy(update={"optimizer": type(training.optimizer)()})


def _adapted(shape: Shape) -> Shape:
    """Return the shape of the model with an adapter of about a hundredth of its parameters."""
    return replace(shape, trained=shape.parameters // 100, root_trained=0, copied=0, head=0, matrices=0)
