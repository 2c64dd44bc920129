"""Estimates whether a job fits into memory before anything is loaded, and chooses what it recomputes."""

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
# Usable share of a device's memory: allocators, collectives and fragmentation take the rest.
_USABLE_SHARE = 0.92
# Share of the limit up to which chunks become large: the estimate is within 15% of a step's memory, and a job that runs in small
# chunks must not run out of memory for a gain of time.
_LARGE_CHUNKS_SHARE = 0.9
_GIB = 2**30
# A base with less than this share in four bits is that of a mixture: embeddings are at most a quarter of small models.
_MIN_PACKED_SHARE = 0.5
# Two codes of a byte, and an fp32 scale of each for 256 of them.
_EIGHT_BIT_MOMENTS_BYTES = 2 * (1 + 4 / 256)
# Optimizers with smaller states that are suggested to a Full run.
_SMALLER_OPTIMIZERS: tuple[dict[str, str], ...] = (
    {"type": "AdamW8bit"},
    {"type": "AdamW8bit", "weights": "BF16"},
)
# Bytes a token and a layer keeps of its activations, in units of width x bytes a number, without attention's weights
# (as Korthikanti et al., arXiv:2205.05198, table 2, count them). Measured as what a Llama's forward pass leaves
# allocated (tests/unit/trainer/model/memory/test_estimate.py does it again): None 11 widths in fp32 and 13 in bf16, where norms work
# in fp32, and 4 of the feed-forward layer's; Selective 5 and 1. With adapters, whose products are matrix products too, a planned
# Llama 3.1 8B keeps 6 and 2; None 4 widths less, since the weights of norms are frozen, whose gradients need fp32 numbers.
_ATTENTION_WIDTHS = {"None": 12.0, "Selective": 5.0, "Full": 1.0}
_FEED_FORWARD_WIDTHS = {"None": 4.0, "Selective": 1.0, "Full": 0.0}
_ADAPTER_ATTENTION_WIDTHS = {"None": -4.0, "Selective": 1.0, "Full": 0.0}
_ADAPTER_FEED_FORWARD_WIDTHS = {"None": 0.0, "Selective": 1.0, "Full": 0.0}
# Of a token that is copied to experts, a width of each copy: what they get, what they return, and that by the router's weight.
_EXPERT_COPY_WIDTHS = {"None": 3.0, "Selective": 0.0, "Full": 0.0}
# Bytes for each logit of a chunk: the logit, its log-probability and its gradient, all fp32. FP16 scales a copy of the gradient, and a
# distillation has the teacher's too and their divergence. tests/unit/trainer/model/memory/test_estimate.py counts them.
_LOGIT_BYTES, _FP16_LOGIT_BYTES, _DISTILLATION_LOGIT_BYTES = 12, 16, 24


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one rank, in bytes."""

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
        labels = {"layer": "gathered layers"}
        parts = ", ".join(
            f"{labels.get(name, name)} {size / _GIB:.1f}" for name, size in asdict(self).items()
        )
        return f"{self.total / _GIB:.1f} GiB a rank ({parts})"


def estimate(
    shape: Shape,
    recipe: Recipe,
    *,
    shards: int,
    row_tokens: int,
    recompute: str,
    chunk_numbers: int = chunked_loss.SMALL_CHUNK_NUMBERS,
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
    compute_bytes = precision.compute_dtype(recipe.training.precision).itemsize
    trained_bytes = precision.trained_dtype(recipe.training).itemsize
    frozen_numbers = shape.parameters - shape.trained - shape.unsharded
    tokens = recipe.training.per_device_batch_size * row_tokens
    activation_bytes = estimate_activation_bytes(shape, tokens, compute_bytes, recompute)
    # The backward pass recomputes one layer in full.
    layer_activation_bytes = estimate_activation_bytes(shape, tokens, compute_bytes, "None") / max(
        1, shape.layers
    )
    embedding = shape.embedding_trained if shape.unsharded else shape.embedding
    output = shape.output_trained if shape.unsharded else shape.output
    always_gathered = embedding if shape.tied else 0
    layer_numbers = (shape.parameters - shape.unsharded - embedding - output) / max(1, shape.layers)
    trained_layer_numbers = (shape.trained - shape.embedding_trained - shape.output_trained) / max(
        1, shape.layers
    )
    chunk_logits = min(chunk_numbers, tokens * shape.vocabulary)
    # With several ranks, FSDP gathers weights into a buffer and copies them out of it.
    buffer_factor = 1 if shards == 1 else 2
    # Gradients of earlier passes of a step stay in memory; FSDP sums them over replicas in fp32.
    is_accumulating = recipe.training.gradient_accumulation > 1
    gradient_number_bytes = 4 if is_accumulating and recipe.distributed.strategy != "FSDP" else trained_bytes
    gradients = gradient_number_bytes * shape.trained / shards
    baseline = Estimate(
        weights=(trained_bytes * shape.trained + compute_bytes * frozen_numbers + 4 * shape.initial) / shards
        + compute_bytes * shape.teacher
        + shape.unsharded_bytes,
        gradients=gradients if is_accumulating else 0,
        optimizer=_optimizer_bytes(shape, recipe) / shards,
        activations=0,
        layer=compute_bytes * always_gathered,
        loss=0,
    )
    # FSDP copies gradients into an fp32 buffer to reduce them.
    reduction_bytes = (compute_bytes + 4) * shape.embedding_trained + compute_bytes * shape.copied
    return max(
        replace(baseline, layer=compute_bytes * (buffer_factor * embedding + shape.copied / 2)),
        replace(
            baseline,
            activations=activation_bytes,
            layer=baseline.layer + compute_bytes * output,
            loss=max(
                _bytes_per_logit(recipe) * chunk_logits + (4 + compute_bytes) * shape.head,
                compute_bytes * (buffer_factor - 1) * (output + layer_numbers),
            ),
        ),
        replace(
            baseline,
            gradients=baseline.gradients + (compute_bytes + 4) * trained_layer_numbers,
            activations=activation_bytes + layer_activation_bytes,
            layer=baseline.layer + 2 * compute_bytes * layer_numbers,
            # The gradient of an untied output layer is being reduced; that of a tied layer waits for the embedding's.
            loss=compute_bytes * shape.head if shape.tied else 4 * shape.output_trained,
        ),
        replace(baseline, gradients=gradients, layer=max(baseline.layer, reduction_bytes)),
        key=lambda moment: moment.total,
    )


def estimate_activation_bytes(shape: Shape, tokens: int, number_bytes: int, recompute: str) -> float:
    """Return the bytes of activations that a forward pass of all layers keeps for the backward pass.

    Args:
        shape: the model.
        tokens: in a batch.
        number_bytes: bytes of a number of the activations.
        recompute: None, Selective or Full.
    """
    attention, feed_forward = _ATTENTION_WIDTHS[recompute], _FEED_FORWARD_WIDTHS[recompute]
    if shape.trained < shape.parameters:
        attention += _ADAPTER_ATTENTION_WIDTHS[recompute]
        feed_forward += _ADAPTER_FEED_FORWARD_WIDTHS[recompute]
    widths = attention * shape.width + feed_forward * shape.feed_forward
    widths += _EXPERT_COPY_WIDTHS[recompute] * shape.copies * shape.width
    # NB: in each forward pass, peft adds the product of an adapter of experts to all their weights.
    expert_numbers = shape.adapted_experts if recompute == "None" else 0
    return number_bytes * (shape.layers * tokens * widths + expert_numbers)


def _bytes_per_logit(recipe: Recipe) -> int:
    if recipe.objective.type == "Distillation":
        return _DISTILLATION_LOGIT_BYTES
    return _FP16_LOGIT_BYTES if recipe.training.precision == "FP16" else _LOGIT_BYTES


def _optimizer_bytes(shape: Shape, recipe: Recipe) -> float:
    """Return the bytes of the optimizer states of all trained weights: two fp32 moments per number in AdamW, one in Muon."""
    kind = recipe.training.optimizer.type
    if kind == "Muon":
        return 4 * shape.matrices + 8 * (shape.trained - shape.matrices)
    if kind == "AdamW8bit":
        return 8 * shape.embeddings + _EIGHT_BIT_MOMENTS_BYTES * (shape.trained - shape.embeddings)
    return 8 * shape.trained


def estimate_staged_bytes(shape: Shape, recipe: Recipe, *, shards: int) -> float:
    """Estimate the bytes of the copy of a rank's trained state in host memory, from which asynchronous checkpoints are written."""
    if recipe.checkpoint is None or recipe.checkpoint.mode != "Async":
        return 0.0
    trained_bytes: int = precision.trained_dtype(recipe.training).itemsize
    return (trained_bytes * shape.trained + 4 * shape.initial + _optimizer_bytes(shape, recipe)) / shards


def read_memory_limit(world: World) -> float:
    """Read the memory limit of one rank in bytes: that of its GPU, or its share of the pod's."""
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
    estimate: the memory that the job then needs.
    limit: the bytes that a rank may use.
    shape: the sizes of the model.
    staged: bytes of host memory for checkpoints, which the estimate does not include.
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
        """The choice as it is recorded in the MLflow run."""
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

    Activation checkpointing is the recipe's; for Auto it is the least recomputation that fits, or the most if nothing fits. Chunks are
    large if they fit with room to spare, on a GPU, and if the output layer is trained: a frozen layer has no gradient to sum, and a
    CPU gains no time.
    """
    shape = Shape.of(network, teacher, quantized=recipe.method.type == "QLoRA", ranks=world.size)
    kinds = _candidate_kinds(shape, recipe)
    shards = _count_shards(recipe, world)
    limit = read_memory_limit(world) * _USABLE_SHARE
    estimate_for = partial(estimate, shape, recipe, shards=shards, row_tokens=row_tokens)
    for kind in kinds:
        chosen_estimate = estimate_for(recompute=kind)
        if chosen_estimate.total <= limit or kind == kinds[-1]:
            break
    chunk_numbers = chunked_loss.SMALL_CHUNK_NUMBERS
    # NB: in FP16 the gradient of the output layer is a sum over a chunk that FP16 must hold, and the scale of the loss comes after it.
    if world.card is not None and shape.head and recipe.training.precision != "FP16":
        large_chunk_estimate = estimate_for(recompute=kind, chunk_numbers=chunked_loss.LARGE_CHUNK_NUMBERS)
        if large_chunk_estimate.total <= _LARGE_CHUNKS_SHARE * limit:
            chosen_estimate, chunk_numbers = large_chunk_estimate, chunked_loss.LARGE_CHUNK_NUMBERS
    return Choice(
        kind,
        chunk_numbers,
        chosen_estimate,
        limit,
        shape,
        estimate_staged_bytes(shape, recipe, shards=shards),
    )


def _candidate_kinds(shape: Shape, recipe: Recipe) -> tuple[Recomputation, ...]:
    """Return the kinds of activation checkpointing to choose from."""
    kind = recipe.training.activation_checkpointing
    if kind != "Auto":
        return (kind,)
    return KINDS if shape.can_recompute else KINDS[:1]


def replace_recomputation(
    choice: Choice, kind: Recomputation, recipe: Recipe, world: World, row_tokens: int
) -> Choice:
    """Return a choice with another activation checkpointing, and the estimate for it."""
    changed_estimate = estimate(
        choice.shape,
        recipe,
        shards=_count_shards(recipe, world),
        row_tokens=row_tokens,
        recompute=kind,
        chunk_numbers=choice.chunk_numbers,
    )
    return replace(choice, kind=kind, estimate=changed_estimate)


def choose(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Decide, and log it.

    Raises:
        RecipeRefusedError: the job does not fit; the message has the estimate and what would fit.
    """
    choice = decide(network, recipe, world, row_tokens, teacher)
    limit = choice.limit
    world.say(f"memory: {choice}")
    unpacked_note = _describe_unpacked(choice.shape)
    if unpacked_note:
        world.say(unpacked_note)
    if choice.staged:
        where = f"{'pinned ' if world.card else ''}host memory"
        world.say(
            f"asynchronous checkpoints keep a copy of {choice.staged / _GIB:.1f} GiB per rank in {where}"
        )
    if choice.estimate.total > limit:
        raise RecipeRefusedError(
            f"the job needs about {choice.estimate}, but a rank has {limit / _GIB:.1f} GiB: "
            + _suggest_changes(choice, recipe, world, row_tokens)
            + (f"; {unpacked_note}" if unpacked_note else ""),
            reason="OutOfMemory",
        )
    return choice


def agree(choice: Choice, world: World) -> Choice:
    """Return the choice of the rank that recomputes most, or of those the rank with the least memory; a collective call.

    NB: ranks on different GPUs choose differently for Auto, and all of them must take part in `recomputation.verify`.
    """
    agreed = max(world.gather(choice), key=lambda each: (KINDS.index(each.kind), -each.limit))
    if (agreed.kind, agreed.chunk_numbers) != (choice.kind, choice.chunk_numbers):
        world.say(f"memory of the smallest rank: {agreed}")
    return agreed


def _describe_unpacked(shape: Shape) -> str | None:
    """Describe which share of a quantized base is in 4 bits; None: most of it is, or the base is not quantized."""
    frozen = shape.parameters - shape.trained
    if not shape.four_bits or shape.four_bits >= _MIN_PACKED_SHARE * frozen:
        return None
    share = shape.four_bits / frozen
    return f"{share:.0%} of the base is quantized to 4 bits: experts that the model stores in one tensor are not quantized"


def _count_shards(recipe: Recipe, world: World) -> int:
    return {"FSDP": world.size, "HSDP": world.local_size, "DDP": 1}[recipe.distributed.strategy]


def _suggest_changes(choice: Choice, recipe: Recipe, world: World, row_tokens: int) -> str:
    """Describe the smallest changes of the recipe that make the estimate fit, with the most recomputation that the model supports."""
    training, suggestions, limit = recipe.training, [], choice.limit
    recompute = "Full" if choice.shape.can_recompute else "None"

    def fits(
        shards: int,
        *,
        shape: Shape = choice.shape,
        training: Training = training,
        batch_size: int = training.per_device_batch_size,
    ) -> bool:
        changed_recipe = recipe.model_copy(
            update={"training": training.model_copy(update={"per_device_batch_size": batch_size})}
        )
        needed_memory = estimate(
            shape, changed_recipe, shards=shards, row_tokens=row_tokens, recompute=recompute
        )
        return needed_memory.total <= limit

    shards = _count_shards(recipe, world)
    if fits(shards):
        return "what would fit: training.activationCheckpointing Full (or Auto)"
    if training.per_device_batch_size > 1 and fits(shards, batch_size=1):
        addition = " with activationCheckpointing Full" if recompute == "Full" else ""
        suggestions.append(f"training.perDeviceBatchSize 1{addition}")
    if recipe.distributed.strategy != "FSDP" and fits(world.size):
        suggestions.append("distributed.strategy FSDP")
    ranks = world.size
    while ranks <= 1024 * world.size:
        ranks *= 2
        if fits(ranks):
            suggestions.append(f"{ranks} ranks with FSDP")
            break
    if recipe.method.type == "Full":
        suggestions += _suggest_optimizer(recipe, lambda training: fits(shards, training=training))
    if recipe.method.type == "Full" and fits(
        shards, shape=_with_adapter(choice.shape), training=_with_default_optimizer(training)
    ):
        suggestions.append("method LoRA")
    return (
        f"what would fit: {'; '.join(suggestions)}"
        if suggestions
        else "use a smaller model, or lower training.maxLength"
    )


def _suggest_optimizer(recipe: Recipe, fits: Callable[[Training], bool]) -> list[str]:
    """Describe the first smaller optimizer that fits, preferring to keep the precision of the weights."""
    for fields in _SMALLER_OPTIMIZERS if recipe.training.precision == "BF16" else _SMALLER_OPTIMIZERS[:1]:
        smaller_optimizer = recipe.training.optimizer.model_copy(update={**fields, "momentum": None})
        if fits(recipe.training.model_copy(update={"optimizer": smaller_optimizer})):
            settings = " with ".join(f"{name} {value}" for name, value in fields.items())
            without = " without momentum" if recipe.training.optimizer.momentum is not None else ""
            return [f"training.optimizer.{settings}{without}"]
    return []


def _with_default_optimizer(training: Training) -> Training:
    """Return the hyperparameters with the optimizer's defaults, which adapters take."""
    return training.model_copy(update={"optimizer": type(training.optimizer)()})


def _with_adapter(shape: Shape) -> Shape:
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
