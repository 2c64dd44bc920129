"""Chooses what a job recomputes and how large the chunks of its loss are, so that it fits into memory."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds.contract import MemoryPlan
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.memory.estimate import (
    GIB,
    Estimate,
    count_shards,
    estimate,
    estimate_staged_bytes,
)
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.memory.suggestions import suggest_changes
from finetune_trainer.train.model.network import chunked_loss

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

# From the least recomputation to the most.
KINDS: tuple[Recomputation, ...] = ("None", "Selective", "Full")
# Usable share of a device's memory: allocators, collectives and fragmentation use the rest.
_USABLE_SHARE = 0.92
# Large chunks must fit into this share of the limit: the estimate is within 15% of a step's memory, and a job that fits with small
# chunks must not run out of memory to gain time.
_LARGE_CHUNKS_SHARE = 0.9
# In a base without experts, only the embeddings are not quantized, and they are at most a quarter of its parameters, even in a small model.
# So if less than this share of a base is in 4 bits, it has experts that are not quantized.
_MIN_PACKED_SHARE = 0.5


def read_memory_limit(world: World) -> float:
    """Read the memory limit of one rank in bytes: the memory of its GPU, or its share of the pod's; infinite if unknown."""
    if world.card is not None:
        return float(world.card.memory)
    limits = []
    # `int` raises ValueError for `max`, the value of a cgroup without a limit.
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        total_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:"))
        limits.append(1024 * total_kib)
    return min(limits) / world.local_size if limits else float("inf")


@dataclass(frozen=True)
class Choice:
    """How a job uses the memory of a rank.

    kind: the activation checkpointing, one of KINDS.
    chunk_numbers: the number of logits in a chunk of the loss.
    estimate: the memory that the job needs with this choice.
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
            f"about {self.estimate} of {self.limit / GIB:.1f} GiB; activation checkpointing {self.kind}; "
            f"{self.describe_chunk()}"
        )

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the loss."""
        return max(1, self.chunk_numbers // self.shape.outputs)

    def describe_chunk(self) -> str:
        """Return how many tokens a chunk of the loss has; the loss of a reward model has no chunks."""
        if self.shape.outputs == 1:
            return "one reward a document"
        return f"logits of {self.chunk} tokens at a time"

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
    shards = count_shards(recipe, world)
    limit = read_memory_limit(world) * _USABLE_SHARE
    estimate_for = partial(estimate, shape, recipe, shards=shards, row_tokens=row_tokens)
    # `kind` and `chosen_estimate` become those of the first kind that fits, or of the last.
    for kind in kinds:
        chosen_estimate = estimate_for(recompute=kind)
        if chosen_estimate.total <= limit or kind == kinds[-1]:
            break
    chunk_numbers = chunked_loss.SMALL_CHUNK_NUMBERS
    # NB: the chunked loss computes gradients in its forward pass, before the loss is scaled. In FP16, the sum of the gradients of a chunk
    # must not leave the range of FP16, so chunks stay small.
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
        staged=estimate_staged_bytes(shape, recipe, shards=shards),
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
        shards=count_shards(recipe, world),
        row_tokens=row_tokens,
        recompute=kind,
        chunk_numbers=choice.chunk_numbers,
    )
    return replace(choice, kind=kind, estimate=changed_estimate)


def choose(
    network: Network, recipe: Recipe, world: World, row_tokens: int, teacher: Network | None
) -> Choice:
    """Choose as `decide` does, log the choice, and check that it fits.

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
            f"asynchronous checkpoints keep a copy of {choice.staged / GIB:.1f} GiB per rank in {where}"
        )
    if choice.estimate.total > limit:
        raise RecipeRefusedError(
            f"the job needs about {choice.estimate}, but a rank has {limit / GIB:.1f} GiB: "
            + suggest_changes(choice.shape, recipe, world, row_tokens=row_tokens, limit=limit)
            + (f"; {unpacked_note}" if unpacked_note else ""),
            reason="OutOfMemory",
        )
    return choice


def agree(choice: Choice, world: World) -> Choice:
    """Return the choice of the rank that recomputes most and, among equals, has the least memory; a collective call.

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
