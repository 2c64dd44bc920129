"""Packs examples into sequences, plans the sequences of each step, and collates batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune_trainer.train.data.dataset import concatenate_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune_trainer.train.data.dataset import Split

# The target of a token without loss: torch's cross_entropy ignores this value.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """The input of one forward pass on one rank: a row has one sequence of examples, padded on the right.

    An example is one or two documents (`Split`); tokens attend only to their own document. For example, two rows with a document of 2 and
    one of 3 tokens have the position_ids [[0, 1, 0], [0, 1, 2]], the owners [[0, 0, 0], [1, 1, 1]] and the cu_seqlens [0, 2, 3, 6].

    input_ids: token ids, int64 [rows, length].
    position_ids: position of each token in its document, int64 [rows, length]; the padding at the end of a row is a
        separate document. transformers derives the attention mask from the positions: a position that is not its
        predecessor plus one starts a document.
    targets: the next token of the same document, or IGNORED, int64 [rows, length].
    owners: index of the token's document among the documents that are not padding; 0 for padding, int64
        [rows, length].
    cu_seqlens: where each document begins in the flattened rows, padding included, and finally rows * length, int32
        [documents + 1], as variable-length attention takes it; longer for compiled layers (`collate`).
    examples: indices of the examples in the split, in the order of their documents, int64 [examples]; with two
        documents per example, documents 2i and 2i + 1 belong to examples[i].
    target_at: indices in the flattened rows of the targets that are not IGNORED, ascending, int64 [targets_count].
    last_at: index in the flattened rows of the last token of each document that is not the padding token, int64 [documents]; a document may
        end with that token, since it is the end of text of many tokenizers. Documents of padding have none.
    reference: the reference's log-probabilities of both documents of `examples`, fp32 [examples, 2]; None unless the
        split has them.
    labels: whether the answers of `examples` are good, bool [examples]; None unless the split has them.
    margins: by how much the chosen answers of `examples` are better, fp32 [examples]; None unless the split has them.
    max_seqlen: tokens in the longest document, padding included; the row length for compiled layers.
    tokens: tokens that are not padding.
    targets_count: targets that are not IGNORED.
    attended: the sum of the squared lengths of the documents that are not padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    cu_seqlens: torch.Tensor
    examples: torch.Tensor
    target_at: torch.Tensor
    last_at: torch.Tensor
    reference: torch.Tensor | None
    labels: torch.Tensor | None
    margins: torch.Tensor | None
    max_seqlen: int
    tokens: int
    targets_count: int
    attended: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device; a copy to a GPU is asynchronous, from pinned memory."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        if device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        moved: dict[str, Any] = {
            name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()
        }
        return replace(self, **moved)

    def at_targets(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor [rows, length, ...] at `target_at`, [targets_count, ...]."""
        return values.flatten(0, 1).index_select(0, self.target_at)

    def at_last_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor [rows, length, ...] at `last_at`, [documents, ...]."""
        return values.flatten(0, 1).index_select(0, self.last_at)


def pack_examples(lengths: np.ndarray, *, max_length: int, packing: bool) -> list[list[int]]:
    """Distribute examples over sequences of at most `max_length` tokens; return the indices of the examples of each sequence.

    Packing is best-fit decreasing: the longest example first, into the fullest sequence with enough room, and the
    oldest of equally full sequences. An example longer than `max_length` has a sequence to itself.

    lengths: tokens of each example.
    """
    if not packing:
        return [[example] for example in range(len(lengths))]
    sequences: list[list[int]] = []
    # The room of a sequence is the number of its free tokens. For each room, a heap of the indices of the sequences with that room.
    by_room: dict[int, list[int]] = {}
    # The keys of `by_room` with a heap that is not empty, as a bit set: the best fit is the lowest set bit at or above a length.
    rooms = 0
    order = np.argsort(-lengths, kind="stable")
    for example, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        # Bit n is set if a sequence has room for n tokens more than the example: with the rooms 3 and 5 (0b101000), an example of 2 tokens
        # has the excesses 1 and 3 (0b1010).
        excesses = rooms >> length
        if excesses:
            lowest_excess = (excesses & -excesses).bit_length() - 1
            room = length + lowest_excess
            heap = by_room[room]
            index = heappop(heap)
            if not heap:
                rooms ^= 1 << room
            sequences[index].append(example)
        else:
            room, index = max_length, len(sequences)
            sequences.append([example])
        if room > length:
            heappush(by_room.setdefault(room - length, []), index)
            rooms |= 1 << (room - length)
    return sequences


@dataclass(frozen=True)
class Plan:
    """The sequences that each step trains on.

    The plan is the concatenation of all epochs, each in an order that depends only on the seed and the epoch. A step
    takes the next `global_batch` sequences, on any number of ranks.
    """

    sequences: Sequence[Sequence[int]]
    """The indices of the examples in each sequence (`pack_examples`)."""
    global_batch: int
    seed: int
    max_steps: int
    total: int
    """Sequences in all steps, repeats included; the last step may have fewer than the others."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        global_batch: int,
        seed: int,
        epochs: float | None,
        max_steps: int | None,
    ) -> Plan:
        """Make a plan of a number of epochs (by default one) or of steps."""
        if max_steps is not None:
            return cls(sequences, global_batch, seed, max_steps=max_steps, total=max_steps * global_batch)
        total = math.ceil((epochs or 1.0) * len(sequences))
        steps = math.ceil(total / global_batch)
        return cls(sequences, global_batch, seed, max_steps=steps, total=total)

    def order(self, epoch: int) -> np.ndarray:
        """Return the order of the sequences in an epoch, int64 [sequences]."""
        return _shuffle_epoch(self.seed, epoch, len(self.sequences))

    def sequences_from(self, step: int) -> list[Sequence[int]]:
        """Return the sequences of all steps from `step` on, without repeats."""
        begin = min(step * self.global_batch, self.total)
        # From any `begin`, the next 2 * len(sequences) positions contain a complete epoch, in which every sequence occurs.
        positions = range(begin, min(self.total, begin + 2 * len(self.sequences)))
        indices = dict.fromkeys(self._index_at(position) for position in positions)
        return [self.sequences[index] for index in indices]

    def _index_at(self, position: int) -> int:
        """Return the index of the sequence at a position of the plan."""
        epoch, position_in_epoch = divmod(position, len(self.sequences))
        return int(self.order(epoch)[position_in_epoch])

    def of_step(self, step: int) -> list[Sequence[int]]:
        """Return the sequences of a step; the first step is 0."""
        begin = step * self.global_batch
        positions = range(begin, min(begin + self.global_batch, self.total))
        return [self.sequences[self._index_at(position)] for position in positions]


@lru_cache(maxsize=2)
def _shuffle_epoch(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def split_among_ranks(
    sequences: Sequence[Sequence[int]], *, rank: int, ranks: int, batch_size: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Yield a rank's share of some sequences, in rounds of at most `batch_size`.

    Every rank gets the same number of rounds, because every rank runs the same collectives; a round may be empty. For example, of five
    sequences in rounds of two, the first of two ranks gets 0 and 1, then 4; the second gets 2 and 3, then none.
    """
    for begin in range(0, len(sequences), ranks * batch_size):
        share_begin = begin + rank * batch_size
        yield sequences[share_begin : share_begin + batch_size]


def collate(
    split: Split,
    sequences: Sequence[Sequence[int]],
    *,
    pad_id: int,
    width: int | None = None,
    compiled: bool = False,
) -> Batch:
    """Collate some sequences, one per row.

    Without sequences, the batch is one row of padding, so that the rank takes part in the collectives.

    Args:
        split: has the examples.
        sequences: the indices of the examples in each sequence.
        pad_id: the padding token.
        width: tokens per row; None: as many as the longest sequence.
        compiled: whether layers are compiled for each shape. Then, to limit the number of shapes, `cu_seqlens` ends in empty documents,
            and `max_seqlen` is the width. Both make attention slower.

    Raises:
        ValueError: a sequence has more than `width` tokens.
    """
    examples = np.array([example for sequence in sequences for example in sequence], np.int64)
    # Documents are numbered as in `split.offsets`; `begins`, `sizes`, `before` and `starts` have a value for each document.
    documents = (examples[:, None] * split.documents + np.arange(split.documents)).ravel()
    begins = np.asarray(split.offsets[documents])
    sizes = np.asarray(split.offsets[documents + 1]) - begins
    height = max(len(sequences), 1)
    documents_per_row = np.array([len(sequence) * split.documents for sequence in sequences], np.int64)
    row_of_document = np.repeat(np.arange(len(sequences)), documents_per_row)
    # Tokens of each row that are not padding.
    filled = np.bincount(row_of_document, weights=sizes, minlength=height).astype(np.int64)
    width = max(1, int(filled.max())) if width is None else width
    if filled.max() > width:
        raise ValueError(f"a sequence of {filled.max()} tokens does not fit a width of {width}")

    # In the flattened rows, a document starts after the tokens before it and the padding of the rows above it.
    before = np.cumsum(sizes) - sizes
    padding_above = np.cumsum(width - filled) - (width - filled)
    starts = before + padding_above[row_of_document]
    places, sources = concatenate_ranges(starts, sizes), concatenate_ranges(begins, sizes)
    tokens, loss_mask = split.tokens[sources], split.loss_mask[sources]
    next_tokens = np.full(len(tokens), IGNORED, np.int64)
    next_tokens[:-1] = np.where(loss_mask[1:], tokens[1:], IGNORED)
    # The last token of a document has no next token.
    next_tokens[before + sizes - 1] = IGNORED

    ids = np.full(height * width, pad_id, np.int64)
    ids[places] = tokens
    # Counts from 0 where the padding of each row begins; the next line overwrites the positions of the documents.
    positions = (np.arange(width) - filled[:, None]).ravel()
    positions_in_documents = np.arange(len(tokens)) - np.repeat(before, sizes)
    positions[places] = positions_in_documents
    targets = np.full(height * width, IGNORED, np.int64)
    targets[places] = next_tokens
    target_at = np.flatnonzero(targets != IGNORED)
    owners = np.zeros(height * width, np.int64)
    owners[places] = np.repeat(np.arange(len(sizes)), sizes)
    cu_seqlens = np.append(np.flatnonzero(positions == 0), height * width).astype(np.int32)
    max_seqlen = int(np.diff(cu_seqlens).max())
    if compiled:
        max_seqlen = width
        # Lengthen `cu_seqlens` to a power of two.
        empty = (1 << (len(cu_seqlens) - 1).bit_length()) - len(cu_seqlens)
        cu_seqlens = np.append(cu_seqlens, np.full(empty, height * width, np.int32))
    return Batch(
        input_ids=torch.from_numpy(ids.reshape(height, width)),
        position_ids=torch.from_numpy(positions.reshape(height, width)),
        targets=torch.from_numpy(targets.reshape(height, width)),
        owners=torch.from_numpy(owners.reshape(height, width)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        examples=torch.from_numpy(examples),
        target_at=torch.from_numpy(target_at),
        last_at=torch.from_numpy(starts + _find_last_tokens(tokens, positions_in_documents, before, pad_id)),
        reference=None if split.reference is None else torch.from_numpy(split.reference[examples]),
        labels=None if split.labels is None else torch.from_numpy(split.labels[examples]),
        margins=None if split.margins is None else torch.from_numpy(split.margins[examples]),
        max_seqlen=max_seqlen,
        tokens=len(tokens),
        targets_count=len(target_at),
        attended=int((sizes**2).sum()),
    )


def _find_last_tokens(
    tokens: np.ndarray, positions: np.ndarray, begins: np.ndarray, pad_id: int
) -> np.ndarray:
    """Return the position in each document of its last token that is not `pad_id`, int64 [documents]; 0 if it has no other token.

    transformers' classes for sequence classification score this token, since they cannot tell padding from a document's own token.

    Args:
        tokens: of all documents, concatenated.
        positions: of the tokens in their documents.
        begins: index of the first token of each document, which has at least one.
        pad_id: the padding token.
    """
    return np.maximum.reduceat(np.where(tokens == pad_id, 0, positions), begins) if len(begins) else begins
