"""Whether a job fits into the memory there is, before anything is loaded, and what it has to recompute to."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds.contract import MemoryPlan
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model import precision
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network import chunked_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_crds.training import Training
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

# From the least recomputation to the most.
KINDS: tuple[Recomputation, ...] = ("None", "Selective", "Full")
# Share of a device's memory that allocators, collectives and fragments leave to us.
_USABLE = 0.92
# Share of the limit below which chunks become large: the estimate is within 15% of what a step takes, and what runs in small chunks
# must not fill the card for a gain of time.
_ROOM_FOR_LARGE = 0.9
_GIB = 2**30
# A base with less than this share in four bits is that of a mixture: embeddings are at most a quarter of small models.
_MOSTLY = 0.5
# Two codes of a byte, and an fp32 scale of each for 256 of them.
_EIGHT_BITS = 2 * (1 + 4 / 256)
# What a Full run may change of its optimizer to need less.
_SMALLER: tuple[dict[str, str], ...] = ({"type": "AdamW8bit"}, {"type": "AdamW8bit", "weights": "BF16"})
# Bytes a token and a layer keeps of its activations, in units of width x bytes a number, without attention's weights
# (as Korthikanti et al., arXiv:2205.05198, table 2, count them). Measured as what a Llama's forward pass leaves
# allocated (tests/unit/trainer/model/memory/test_estimate.py does it again): None 11 widths in fp32 and 13 in bf16, where norms work
# in fp32, and 4 of the feed-forward layer's; Selective 5 and 1. With adapters, whose products are matrix products too, a planned
# Llama 3.1 8B keeps 6 and 2; None 4 widths less, since the weights of norms are frozen, whose gradients need fp32 numbers.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 5.0, "Full": 1.0}
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 1.0, "Full": 0.0}
_ATTENTION_OF_ADAPTERS = {"None": -4.0, "Selective": 1.0, "Full": 0.0}
_FEED_FORWARD_OF_ADAPTERS = {"None": 0.0, "Selective": 1.0, "Full": 0.0}
# Of a token that is copied to experts, a width of each copy: what they get, what they return, and that by the router's weight.
_COPIED_WIDTHS = {"None": 3.0, "Selective": 0.0, "Full": 0.0}
# Bytes for each logit of a chunk: the logit, its log-probability and its gradient, all fp32. FP16 scales a copy of the gradient, and a
# distillation has the teacher's too and their divergence. tests/unit/trainer/model/memory/test_estimate.py counts them.
_LOGIT, _LOGIT_IN_FP16, _LOGIT_WITH_TEACHER = 12, 16, 24


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank when it needs most, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    layer: float
    """Gathered weights of the current layer, the next one and of both ends, and the gradient of an end while it is reduced."""
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


def estimate(
    shape: Shape,
    recipe: Recipe,
    *,
    shards: int,
    row_tokens: int,
    recompute: str,
    chunk_numbers: int = chunked_loss.SMALL,
) -> Estimate:
    """Estimate the peak memory of one rank: when the embedding is gathered, in the loss, or at the start or end of the backward pass.

    Trained weights and their gradients are fp32 or bf16, with the moments of their optimizer; frozen weights have the
    dtype that they compute in. tests/long/trainer/test_plans.py compares this with planned steps.

    Args:
        shape: the model.
        recipe: precision, method and batch size.
        shards: number of ranks over which parameters are sharded.
        row_tokens: tokens per row of a batch.
        recompute: None, Selective or Full.
        chunk_numbers: logits of a chunk.
    """
    compute = precision.compute(recipe.training.precision).itemsize
    trained = precision.trained(recipe.training).itemsize
    frozen = shape.parameters - shape.trained - shape.whole
    tokens = recipe.training.per_device_batch_size * row_tokens
    kept = activations(shape, tokens, compute, recompute)
    # The backward pass recomputes one layer in full.
    working = activations(shape, tokens, compute, "None") / max(1, shape.layers)
    embedding = shape.embedding_trained if shape.whole else shape.embedding
    output = shape.output_trained if shape.whole else shape.output
    root = embedding if shape.tied else 0
    a_layer = (shape.parameters - shape.whole - embedding - output) / max(1, shape.layers)
    a_trained_layer = (shape.trained - shape.embedding_trained - shape.output_trained) / max(1, shape.layers)
    chunk = min(chunk_numbers, tokens * shape.vocabulary)
    # Between ranks, what is gathered lies in a buffer, and is then copied out of it.
    twice = 1 if shards == 1 else 2
    # Those of earlier passes of a step are there all the time; between replicas they are summed up in fp32.
    accumulates = recipe.training.gradient_accumulation > 1
    a_gradient = 4 if accumulates and recipe.distributed.strategy != "FSDP" else trained
    gradients = a_gradient * shape.trained / shards
    held = Estimate(
        weights=(trained * shape.trained + compute * frozen + 4 * shape.initial) / shards
        + compute * shape.teacher
        + shape.whole_bytes,
        gradients=gradients if accumulates else 0,
        optimizer=_moments(shape, recipe) / shards,
        activations=0,
        layer=compute * root,
        loss=0,
    )
    # What FSDP reduces it copies into a buffer in fp32.
    reduced = (compute + 4) * shape.embedding_trained + compute * shape.copied
    return max(
        replace(held, layer=compute * (twice * embedding + shape.copied / 2)),
        replace(
            held,
            activations=kept,
            layer=held.layer + compute * output,
            loss=max(
                _of_a_logit(recipe) * chunk + (4 + compute) * shape.head,
                compute * (twice - 1) * (output + a_layer),
            ),
        ),
        replace(
            held,
            gradients=held.gradients + (compute + 4) * a_trained_layer,
            activations=kept + working,
            layer=held.layer + 2 * compute * a_layer,
            # That of an output layer of its own is being reduced; that of a tied one waits for the embedding's.
            loss=compute * shape.head if shape.tied else 4 * shape.output_trained,
        ),
        replace(held, gradients=gradients, layer=max(held.layer, reduced)),
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
    attention, feed_forward = _ATTENTION_WIDTHS[recompute], _FEED_FORWARD_WIDTHS[recompute]
    if shape.trained < shape.parameters:
        attention += _ATTENTION_OF_ADAPTERS[recompute]
        feed_forward += _FEED_FORWARD_OF_ADAPTERS[recompute]
    widths = attention * shape.width + feed_forward * shape.feed_forward
    widths += _COPIED_WIDTHS[recompute] * shape.copies * shape.width
    # NB: peft adds the product of an adapter of experts to all their weights, in each forward pass.
    adapted = shape.adapted_experts if recompute == "None" else 0
    return compute * (shape.layers * tokens * widths + adapted)


def _of_a_logit(recipe: Recipe) -> int:
    if recipe.objective.type == "Distillation":
        return _LOGIT_WITH_TEACHER
    return _LOGIT_IN_FP16 if recipe.training.precision == "FP16" else _LOGIT


def _moments(shape: Shape, recipe: Recipe) -> float:
    """Return the bytes of what the optimizer keeps of all trained weights: two fp32 moments of each in AdamW, one in Muon."""
    kind = recipe.training.optimizer.type
    if kind == "Muon":
        return 4 * shape.matrices + 8 * (shape.trained - shape.matrices)
    if kind == "AdamW8bit":
        return 8 * shape.embeddings + _EIGHT_BITS * (shape.trained - shape.embeddings)
    return 8 * shape.trained


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
    chunk_numbers: logits of a chunk of the loss.
    estimate: what it then needs.
    limit: the bytes that a rank may use.
    shape: the model that this is of.
    staged: bytes of the host for checkpoints, which are no part of the estimate.
    """

    kind: Recomputation
    chunk_numbers: int
    estimate: Estimate
    limit: float
    shape: Shape
    staged: float

    def __str__(self) -> str:
        return (
            f"about {self.estimate} of {self.limit / _GIB:.1f} GiB; activation checkpointing {self.kind}; "
            f"logits of {self.chunk} tokens at a time"
        )

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the loss."""
        return max(1, self.chunk_numbers // self.shape.vocabulary)

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
            four_bit_parameters=self.shape.four_bits or None,
            parts={name: int(size) for name, size in asdict(self.estimate).items()},
        )


def decide(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Choose the activation checkpointing and the chunks of the loss.

    The former is the recipe's, or for Auto the least that fits, or else the most there is. Chunks are large where that fits too, with
    room to spare, on a GPU and with the output layer trained: a frozen one has no gradient to add up, and a CPU no time to win.
    """
    shape = Shape.of(network, teacher, quantized=recipe.method.type == "QLoRA", ranks=world.size)
    kinds = _kinds(shape, recipe)
    shards = _shards(recipe, world)
    limit = available(world) * _USABLE
    needed = partial(estimate, shape, recipe, shards=shards, row_tokens=row_tokens)
    for kind in kinds:
        found = needed(recompute=kind)
        if found.total <= limit or kind == kinds[-1]:
            break
    chunk_numbers = chunked_loss.SMALL
    # NB: in FP16 the gradient of the output layer is a sum over a chunk that FP16 must hold, and the scale of the loss comes after it.
    if world.card is not None and shape.head and recipe.training.precision != "FP16":
        larger = needed(recompute=kind, chunk_numbers=chunked_loss.LARGE)
        if larger.total <= _ROOM_FOR_LARGE * limit:
            found, chunk_numbers = larger, chunked_loss.LARGE
    return Choice(kind, chunk_numbers, found, limit, shape, staged(shape, recipe, shards=shards))


def _kinds(shape: Shape, recipe: Recipe) -> tuple[Recomputation, ...]:
    """The activation checkpointing to choose from."""
    kind = recipe.training.activation_checkpointing
    if kind != "Auto":
        return (kind,)
    return KINDS if shape.can_recompute else KINDS[:1]


def with_recomputation(
    choice: Choice, kind: Recomputation, recipe: Recipe, world: World, row_tokens: int
) -> Choice:
    """Return a choice with another activation checkpointing, and the estimate for it."""
    changed = estimate(
        choice.shape,
        recipe,
        shards=_shards(recipe, world),
        row_tokens=row_tokens,
        recompute=kind,
        chunk_numbers=choice.chunk_numbers,
    )
    return replace(choice, kind=kind, estimate=changed)


def choose(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Decide, and log it.

    Raises:
        RecipeRefusedError: the job does not fit; the message has the numbers, and what would fit.
    """
    choice = decide(network, recipe, world, row_tokens, teacher)
    limit = choice.limit
    world.say(f"memory: {choice}")
    unpacked = _describe_unpacked(choice.shape)
    if unpacked:
        world.say(unpacked)
    if choice.staged:
        where = f"{'pinned ' if world.card else ''}memory of the host"
        world.say(f"asynchronous checkpoints: a copy of {choice.staged / _GIB:.1f} GiB a rank in {where}")
    if choice.estimate.total > limit:
        raise RecipeRefusedError(
            f"the job needs about {choice.estimate} and a rank has {limit / _GIB:.1f} GiB: "
            + _what_would_fit(choice, recipe, world, row_tokens)
            + (f"; {unpacked}" if unpacked else ""),
            reason="OutOfMemory",
        )
    return choice


def agree(choice: Choice, world: World) -> Choice:
    """Return the choice of the rank that recomputes most, or else has the least memory, on all ranks together.

    NB: ranks on different GPUs choose differently for Auto, and all of them must take part in `recomputation.verify`.
    """
    agreed = max(world.gather(choice), key=lambda each: (KINDS.index(each.kind), -each.limit))
    if (agreed.kind, agreed.chunk_numbers) != (choice.kind, choice.chunk_numbers):
        world.say(f"memory of the smallest rank: {agreed}")
    return agreed


def _describe_unpacked(shape: Shape) -> str | None:
    """Say how little of a quantized base is in four bits; None: most of it is, or the base is not quantized."""
    frozen = shape.parameters - shape.trained
    if not shape.four_bits or shape.four_bits >= _MOSTLY * frozen:
        return None
    return f"{shape.four_bits / frozen:.0%} of the base is in four bits: experts that a model keeps in one tensor are not packed"


def _shards(recipe: Recipe, world: World) -> int:
    return {"FSDP": world.size, "HSDP": world.local_size, "DDP": 1}[recipe.distributed.strategy]


def _what_would_fit(choice: Choice, recipe: Recipe, world: World, row_tokens: int) -> str:
    """Describe the smallest changes of the recipe that make the estimate fit, with the most recomputation that the model supports."""
    training, found, limit = recipe.training, [], choice.limit
    recompute = "Full" if choice.shape.can_recompute else "None"

    def fits(
        shards: int,
        *,
        shape: Shape = choice.shape,
        training: Training = training,
        batch_size: int = training.per_device_batch_size,
    ) -> bool:
        changed = recipe.model_copy(
            update={"training": training.model_copy(update={"per_device_batch_size": batch_size})}
        )
        need = estimate(shape, changed, shards=shards, row_tokens=row_tokens, recompute=recompute)
        return need.total <= limit

    shards = _shards(recipe, world)
    if fits(shards):
        return "what would fit: training.activationCheckpointing Full (or Auto)"
    if training.per_device_batch_size > 1 and fits(shards, batch_size=1):
        beside = " with activationCheckpointing Full" if recompute == "Full" else ""
        found.append(f"training.perDeviceBatchSize 1{beside}")
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
    if recipe.method.type == "Full" and fits(shards, shape=_adapted(choice.shape), training=_plain(training)):
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
    trained = shape.parameters // 100
    return replace(
        shape,
        trained=trained,
        embedding_trained=0,
        output_trained=0,
        copied=0,
        head=0,
        matrices=0,
        embeddings=0,
    )
