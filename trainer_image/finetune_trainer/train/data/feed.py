"""The batches of each step, prefetched during the previous step."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_trainer.train.data import pack
from finetune_trainer.train.runtime.recipe import row_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World


@dataclass(frozen=True)
class Examples:
    """Some sequences of a split, each as the indices of its packed examples: [[3, 0], [1, 2]] are two sequences of two examples."""

    split: Split
    sequences: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Collator:
    """Collates this rank's batches.

    world: which rank this is.
    pad_id: the padding token.
    width: tokens per row; None: as many as the longest sequence of the batch.
    compiled: whether layers are compiled for the shapes of a batch.
    """

    world: World
    pad_id: int
    width: int | None
    compiled: bool = False

    @classmethod
    def of(cls, recipe: Recipe, world: World, pad_id: int) -> Collator:
        """Return the collator of a recipe."""
        training = recipe.training
        # One width has two benefits: compiled layers are compiled once, and the allocator of a GPU reuses its blocks. Without compilation,
        # only packed rows on a GPU get one width: they are nearly full, so the padding costs little. A CPU gains nothing from it.
        has_fixed_width = training.compile or (training.packing and world.card is not None)
        width = row_tokens(recipe) if has_fixed_width else None
        return cls(world, pad_id, width, training.compile)

    def batches(self, examples: Examples, batch_size: int) -> Iterator[pack.Batch]:
        """Yield this rank's batches, on the host; every rank gets the same number."""
        ranks = self.world.size
        for sequences in pack.split_among_ranks(
            examples.sequences, rank=self.world.rank, ranks=ranks, batch_size=batch_size
        ):
            yield pack.collate(
                examples.split, sequences, pad_id=self.pad_id, width=self.width, compiled=self.compiled
            )


class Feed:
    """This rank's batches of each step of a plan."""

    def __init__(self, collator: Collator, split: Split, plan: pack.Plan, batch_size: int) -> None:
        self.waited_seconds = 0.0
        """Seconds for which steps waited for their batches."""
        self._collator = collator
        self._split = split
        self._plan = plan
        self._batch_size = batch_size
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        # The step that is being prefetched, and its batches on the host.
        self._ahead: tuple[int, Future[list[pack.Batch]]] | None = None

    @property
    def max_steps(self) -> int:
        """Steps of the plan."""
        return self._plan.max_steps

    def of_step(self, step: int) -> list[pack.Batch]:
        """Return this rank's batches of a step, on its device; every rank gets the same number."""
        started = time.monotonic()
        batches = self._take_prefetched(step)
        if step + 1 < self._plan.max_steps:
            self._ahead = (step + 1, self._worker.submit(self._collate_step, step + 1))
        on_device = [batch.to(self._collator.world.device) for batch in batches]
        self.waited_seconds += time.monotonic() - started
        return on_device

    def close(self) -> None:
        """Stop prefetching."""
        self._worker.shutdown(cancel_futures=True)

    def _take_prefetched(self, step: int) -> list[pack.Batch]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            prefetched_step, batches = ahead
            if prefetched_step == step:
                return batches.result()
        return self._collate_step(step)

    def _collate_step(self, step: int) -> list[pack.Batch]:
        examples = Examples(self._split, self._plan.of_step(step))
        return list(self._collator.batches(examples, self._batch_size))
