"""Which examples share a sequence, and what a batch holds."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.train.data import pack
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.sft import Sft

if TYPE_CHECKING:
    from pathlib import Path


def split_of(*examples: tuple[list[int], int]) -> Split:
    """Examples given as (tokens, tokens of the prompt)."""
    offsets = np.cumsum([0, *(len(tokens) for tokens, _ in examples)])
    tokens = np.array([token for tokens, _ in examples for token in tokens], np.int32)
    learned = [at >= prompt_tokens for tokens, prompt_tokens in examples for at in range(len(tokens))]
    return Split(tokens, np.array(learned), offsets.astype(np.int64))


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_in_exactly_one_sequence_that_it_fits(packing: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = pack.pack_examples(lengths, max_length=100, packing=packing)
    assert sorted(example for row in rows for example in row) == list(range(500))
    assert max(int(lengths[row].sum()) for row in rows) <= 100
    assert (max(len(row) for row in rows) > 1) is packing


def test_packing_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 2000)
    rows = pack.pack_examples(lengths, max_length=1024, packing=True)
    assert lengths.sum() / (len(rows) * 1024) > 0.99


def test_a_batch_holds_positions_and_next_tokens_of_each_example_apart() -> None:
    split = split_of(([5, 6, 7, 8], 2), ([9, 10], 0), ([11, 12, 13], 1))
    batch = pack.collate(split, [[0, 1], [2]], pad_id=1)
    ignored = pack.IGNORED
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10], [11, 12, 13, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]]
    assert batch.targets.tolist() == [
        [ignored, 7, 8, ignored, 10, ignored],
        [12, 13, ignored, ignored, ignored, ignored],
    ]
    assert batch.owners.tolist() == [[0, 0, 0, 0, 1, 1], [2, 2, 2, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9, 12]
    assert batch.examples.tolist() == [0, 1, 2]
    assert (batch.max_seqlen, batch.tokens, batch.targets_count) == (4, 9, 5)
    kinds = {name: value.dtype for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert batch.target_at.tolist() == [1, 2, 4, 6, 7]
    assert batch.last_at.tolist() == [3, 5, 8]
    assert (batch.attended, batch.reference) == (16 + 4 + 9, None)
    integers = ("input_ids", "position_ids", "targets", "owners", "examples", "target_at", "last_at")
    dtypes = dict.fromkeys(integers, torch.int64)
    assert kinds == {**dtypes, "cu_seqlens": torch.int32}


def test_a_batch_can_be_of_a_given_width() -> None:
    split = split_of(([5, 6, 7], 1), ([9, 10], 0))
    batch = pack.collate(split, [[0], [1]], pad_id=1, width=5)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 1], [9, 10, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert (batch.cu_seqlens.tolist(), batch.max_seqlen) == ([0, 3, 5, 7, 10], 3)
    # Shapes that stay: empty documents up to the next power of two, and the longest there can be.
    compiled = pack.collate(split, [[0], [1]], pad_id=1, width=5, compiled=True)
    assert (compiled.cu_seqlens.tolist(), compiled.max_seqlen) == ([0, 3, 5, 7, 10, 10, 10, 10], 5)
    with pytest.raises(ValueError, match="a sequence of 3 tokens does not fit a width of 2"):
        pack.collate(split, [[0]], pad_id=1, width=2)


@pytest.mark.parametrize("width", [None, 4])
def test_a_rank_without_sequences_has_a_row_of_padding(width: int | None) -> None:
    batch = pack.collate(split_of(([5, 6, 7], 1)), [], pad_id=1, width=width)
    assert batch.input_ids.tolist() == [[1] * (width or 1)]
    assert (batch.cu_seqlens.tolist(), batch.examples.tolist()) == ([0, width or 1], [])
    assert (batch.tokens, batch.targets_count) == (0, 0)


def test_a_pair_is_two_documents_of_one_example() -> None:
    pairs = split_of(([5, 6, 7], 1), ([5, 8], 1), ([9, 10], 1), ([9, 11, 12], 1))
    split = Split(pairs.tokens, pairs.loss_mask, pairs.offsets, documents=2)
    assert (len(split), split.lengths.tolist()) == (2, [5, 5])
    batch = pack.collate(split, [[1], [0]], pad_id=1, width=6)
    assert batch.input_ids.tolist() == [[9, 10, 9, 11, 12, 1], [5, 6, 7, 5, 8, 1]]
    assert batch.owners.tolist() == [[0, 0, 1, 1, 1, 0], [2, 2, 2, 3, 3, 0]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 9, 11, 12]
    assert batch.examples.tolist() == [1, 0]


@st.composite
def packed(draw: st.DrawFn) -> tuple[Split, list[list[int]]]:
    """Examples of one or two documents, some of them in sequences."""
    documents = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(1, 6), min_size=documents, max_size=12 * documents))
    sizes = sizes[: len(sizes) // documents * documents]
    total = sum(sizes)
    learned = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    split = Split(
        np.arange(100, 100 + total, dtype=np.int32), np.array(learned), np.cumsum([0, *sizes]), documents
    )
    order = draw(st.permutations(range(len(split))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=4)))
    rows = [order[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return split, [row for row in rows if row]


@given(packed(), st.integers(0, 3))
def test_a_batch_is_what_a_loop_over_its_tokens_makes(
    case: tuple[Split, list[list[int]]], extra: int
) -> None:
    split, rows = case
    width = max(int(split.lengths[row].sum()) for row in rows) + extra
    ids: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    documents, owner = [0], 0
    for row in rows:
        begin = len(ids)
        for example in row:
            for document in range(example * split.documents, (example + 1) * split.documents):
                first, end = int(split.offsets[document]), int(split.offsets[document + 1])
                for at in range(first, end):
                    ids.append(int(split.tokens[at]))
                    positions.append(at - first)
                    follows = at + 1 < end and split.loss_mask[at + 1]
                    targets.append(int(split.tokens[at + 1]) if follows else pack.IGNORED)
                    owners.append(owner)
                documents.append(len(ids))
                owner += 1
        padding = begin + width - len(ids)
        ids += [1] * padding
        positions += range(padding)
        targets += [pack.IGNORED] * padding
        owners += [0] * padding
        documents += [len(ids)] if padding else []
    batch = pack.collate(split, rows, pad_id=1, width=width, compiled=True)
    assert batch.input_ids.flatten().tolist() == ids
    assert batch.position_ids.flatten().tolist() == positions
    assert batch.targets.flatten().tolist() == targets
    assert batch.owners.flatten().tolist() == owners
    assert list(dict.fromkeys(batch.cu_seqlens.tolist())) == documents
    assert batch.max_seqlen == width
    tight = pack.collate(split, rows, pad_id=1)
    assert tight.max_seqlen == max(np.diff(tight.cu_seqlens))
    assert batch.examples.tolist() == [example for row in rows for example in row]


def test_a_batch_moves_to_a_device_whole() -> None:
    batch = pack.collate(split_of(([5, 6, 7], 1)), [[0]], pad_id=1)
    moved = batch.to(torch.device("meta"))
    devices = {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)}
    assert devices == {"meta"}
    assert (moved.max_seqlen, moved.tokens, moved.targets_count) == (3, 3, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_comes_back_from_a_gpu_as_it_was() -> None:
    batch = pack.collate(split_of(([5, 6, 7], 1), ([9, 10], 0)), [[0, 1]], pad_id=1, width=8)
    returned = batch.to(torch.device("cuda")).to(torch.device("cpu"))
    torch.cuda.synchronize()
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(returned, name), value)


def naive_best_fit(lengths: list[int], max_length: int) -> list[list[int]]:
    """Best-fit decreasing as a textbook has it: look at every sequence."""
    packs: list[list[int]] = []
    free: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda example: -lengths[example]):
        fitting = [(room, pack) for pack, room in enumerate(free) if room >= lengths[example]]
        if fitting:
            pack_ = min(fitting)[1]
        else:
            pack_ = len(packs)
            packs.append([])
            free.append(max_length)
        packs[pack_].append(example)
        free[pack_] -= lengths[example]
    return packs


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 64))
def test_packing_is_best_fit_decreasing(lengths: list[int], max_length: int) -> None:
    packs = pack.pack_examples(np.array(lengths, np.int64), max_length=max_length, packing=True)
    assert packs == naive_best_fit(lengths, max_length)


def measure_packing(examples: int) -> float:
    """Return the CPU seconds that it takes to pack this many examples, without those of Python's garbage collector."""
    lengths = np.random.default_rng(0).integers(10, 2048, examples)
    gc.disable()
    try:
        began = time.process_time()
        rows = pack.pack_examples(lengths, max_length=2048, packing=True)
        seconds = time.process_time() - began
    finally:
        gc.enable()
    assert sum(map(len, rows)) == examples
    return seconds


def test_the_time_of_packing_grows_with_the_number_of_examples_not_with_its_square() -> None:
    # NB: seconds alone would measure the machine: 1,000,000 examples took 4 s on one and 10 s on another.
    small = min(measure_packing(80_000) for _ in range(3))
    assert measure_packing(8 * 80_000) / small < 3 * 8


@given(
    count=st.integers(1, 40),
    global_batch=st.integers(1, 20),
    batch_size=st.integers(1, 6),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    seed=st.integers(0, 2**32),
    epochs=st.sampled_from([0.5, 1.0, 2.5]),
)
def test_the_shares_of_a_step_are_the_step_for_any_world_size(
    *, count: int, global_batch: int, batch_size: int, ranks: int, seed: int, epochs: float
) -> None:
    rows = [[example] for example in range(count)]
    plan = pack.Plan.of(rows, global_batch=global_batch, seed=seed, epochs=epochs, max_steps=None)
    for step in range(plan.max_steps):
        sequences = plan.of_step(step)
        rank_shares = [
            list(pack.split_among_ranks(sequences, rank=rank, ranks=ranks, batch_size=batch_size))
            for rank in range(ranks)
        ]
        assert len({len(rounds) for rounds in rank_shares}) == 1
        assert all(len(share) <= batch_size for rounds in rank_shares for share in rounds)
        assert [
            row for round_ in zip(*rank_shares, strict=True) for share in round_ for row in share
        ] == sequences


def test_packed_examples_do_not_see_each_other(base_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model, attn_implementation="sdpa").eval()
    generator = np.random.default_rng(0)
    examples = [(generator.integers(2, 250, size).tolist(), size // 3) for size in (7, 12, 3, 20, 9)]
    split = split_of(*examples)

    def gradients(rows: list[list[int]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss, _ = Network(model, Sft())(pack.collate(split, rows, pad_id=1))
        loss.backward()
        return loss.item(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    # Without padding or neighbors, a row at a time.
    each = [gradients([[example]]) for example in range(5)]
    alone, alone_gradient = gradients([[0], [1], [2], [3], [4]])
    assert alone == pytest.approx(sum(loss for loss, _ in each), rel=1e-6)
    packed, packed_gradient = gradients([[3, 0, 2], [1, 4]])
    assert packed == pytest.approx(alone, rel=1e-6)
    torch.testing.assert_close(packed_gradient, alone_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (2, 6), (4, 1), (3, 2)])
def test_a_step_trains_on_the_same_sequences_whatever_the_number_of_ranks(
    ranks: int, batch_size: int
) -> None:
    rows = [[example] for example in range(30)]
    plan = pack.Plan.of(rows, global_batch=12, seed=7, epochs=2.0, max_steps=None)
    trained_sequences: list[Any] = []
    for step in range(plan.max_steps):
        rank_shares = [
            list(pack.split_among_ranks(plan.of_step(step), rank=rank, ranks=ranks, batch_size=batch_size))
            for rank in range(ranks)
        ]
        assert len({len(rounds) for rounds in rank_shares}) == 1
        trained_sequences.append(
            [row for rounds in zip(*rank_shares, strict=True) for round_ in rounds for row in round_]
        )
    assert trained_sequences == [plan.of_step(step) for step in range(plan.max_steps)]
    assert sorted(row[0] for step in trained_sequences for row in step) == sorted([*range(30), *range(30)])


def test_epochs_have_orders_of_their_own_that_depend_on_the_seed() -> None:
    rows = [[example] for example in range(50)]
    plans = {
        seed: pack.Plan.of(rows, global_batch=5, seed=seed, epochs=3.0, max_steps=None) for seed in (1, 2)
    }
    orders = [plans[seed].order(epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == plans[1].order(0).tolist()


@pytest.mark.parametrize(
    ("epochs", "max_steps", "expected"),
    [
        (None, None, (4, 10)),
        (1.0, None, (4, 10)),
        (0.5, None, (2, 5)),
        (2.5, None, (9, 25)),
        (None, 7, (7, 21)),
    ],
)
def test_steps_follow_from_epochs_or_are_given(
    epochs: float | None, max_steps: int | None, expected: tuple[int, int]
) -> None:
    rows = [[example] for example in range(10)]
    plan = pack.Plan.of(rows, global_batch=3, seed=0, epochs=epochs, max_steps=max_steps)
    assert (plan.max_steps, plan.total) == expected
    assert sum(len(plan.of_step(step)) for step in range(plan.max_steps)) == plan.total
