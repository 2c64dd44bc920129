"""Which examples share a sequence, which sequences make a step, and the tensors of a batch."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune_trainer.train.data import Split

# Label of a token on which no loss is taken.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """What a rank puts through the model at once.

    input_ids: token ids, int64 [rows, length].
    position_ids: position of each token in its own example, int64 [rows, length]. The model's attention mask
        follows from it: a position that does not go on by one begins another example.
    targets: the token that comes next in the same example, or IGNORED, int64 [rows, length].
    tokens: tokens that are no padding.
    targets_count: targets that are not IGNORED.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    tokens: int
    targets_count: int

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.tokens,
            self.targets_count,
        )


def sequences(lengths: np.ndarray, *, max_length: int, packing: bool) -> list[list[int]]:
    """Share examples out over sequences of at most `max_length` tokens; each example is in exactly one.

    With packing, best-fit decreasing: the longest first, each into the fullest sequence that still has room.
    """
    if not packing:
        return [[example] for example in range(len(lengths))]
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens still free, pack), ascending
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            room, pack = max_length, len(packs)
            packs.append([])
        else:
            room, pack = rooms.pop(at)
        packs[pack].append(example)
        if room > length:
            insort(rooms, (room - length, pack))
    return packs


@dataclass(frozen=True)
class Plan:
    """Which sequences each step trains on.

    Sequences stand in one long line, epoch after epoch, each epoch in an order of its own that depends on the
    seed and the epoch alone. A step takes the next `global_batch` of them, whatever the number of ranks.
    """

    sequences: Sequence[Sequence[int]]
    global_batch: int
    seed: int
    max_steps: int
    total: int
    """Sequences in all steps together; the last step may have fewer than the others."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        *,
        global_batch: int,
        seed: int,
        epochs: float | None,
        max_steps: int | None,
    ) -> Plan:
        """A plan for a number of epochs (by default one) or of steps."""
        if max_steps is not None:
            return cls(rows, global_batch, seed, max_steps, max_steps * global_batch)
        total = math.ceil((epochs or 1.0) * len(rows))
        return cls(rows, global_batch, seed, math.ceil(total / global_batch), total)

    def order(self, epoch: int) -> np.ndarray:
        """The order of the sequences in an epoch, int64 [sequences]."""
        return _order(self.seed, epoch, len(self.sequences))

    def of_step(self, step: int) -> list[Sequence[int]]:
        """The sequences of a step, from 0."""
        begin = step * self.global_batch
        positions = range(begin, min(begin + self.global_batch, self.total))
        epochs = {position // len(self.sequences) for position in positions}
        orders = {epoch: self.order(epoch) for epoch in epochs}
        return [
            self.sequences[orders[position // len(self.sequences)][position % len(self.sequences)]]
            for position in positions
        ]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def shares(
    rows: Sequence[Sequence[int]], *, rank: int, ranks: int, batch_size: int
) -> Iterator[Sequence[Sequence[int]]]:
    """A rank's share of some sequences, as rounds of at most `batch_size`.

    Every rank gets the same number of rounds, so that all take part in the same collectives; where there are not
    enough sequences, a round is empty.
    """
    for begin in range(0, len(rows), ranks * batch_size):
        mine = begin + rank * batch_size
        yield rows[mine : min(mine + batch_size, begin + ranks * batch_size)]


def collate(split: Split, rows: Sequence[Sequence[int]], *, pad_id: int) -> Batch:
    """The tensors of some sequences, padded on the right to the longest of them.

    Padding continues the last example's positions: causal attention keeps it from every real token, and a
    sequence with one example needs no mask.
    """
    offsets = split.offsets
    widths = [sum(int(offsets[example + 1] - offsets[example]) for example in row) for row in rows]
    height, width = max(len(rows), 1), max(widths, default=1)
    ids = np.full((height, width), pad_id, np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (height, 1))
    targets = np.full((height, width), IGNORED, np.int64)
    for at, row in enumerate(rows):
        column = 0
        for example in row:
            begin, end = offsets[example], offsets[example + 1]
            size = int(end - begin)
            span = slice(column, column + size)
            ids[at, span] = split.tokens[begin:end]
            positions[at, column:] = np.arange(width - column)
            following = np.where(split.learned[begin + 1 : end], split.tokens[begin + 1 : end], IGNORED)
            targets[at, column : column + size - 1] = following
            column += size
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        torch.from_numpy(targets),
        sum(widths),
        int((targets != IGNORED).sum()),
    )
