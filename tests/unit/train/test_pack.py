"""Which examples share a sequence, and what a batch holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from finetune_trainer.train import pack
from finetune_trainer.train.data import Split
from finetune_trainer.train.objectives import sft

if TYPE_CHECKING:
    from pathlib import Path


def split_of(*examples: tuple[list[int], int]) -> Split:
    """Examples given as (tokens, tokens of the prompt)."""
    offsets = np.cumsum([0, *(len(tokens) for tokens, _ in examples)])
    tokens = np.array([token for tokens, _ in examples for token in tokens], np.int32)
    learned = [at >= given for tokens, given in examples for at in range(len(tokens))]
    return Split(tokens, np.array(learned), offsets.astype(np.int64))


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_in_exactly_one_sequence_that_it_fits(packing: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = pack.sequences(lengths, max_length=100, packing=packing)
    assert sorted(example for row in rows for example in row) == list(range(500))
    assert max(int(lengths[row].sum()) for row in rows) <= 100
    assert (max(len(row) for row in rows) > 1) is packing


def test_packing_leaves_little_room() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 2000)
    rows = pack.sequences(lengths, max_length=1024, packing=True)
    assert lengths.sum() / (len(rows) * 1024) > 0.99


def test_a_batch_holds_positions_and_next_tokens_of_each_example_apart() -> None:
    split = split_of(([5, 6, 7, 8], 2), ([9, 10], 0), ([11, 12, 13], 1))
    batch = pack.collate(split, [[0, 1], [2]], pad_id=1)
    ignored = pack.IGNORED
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 10], [11, 12, 13, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [
        [ignored, 7, 8, ignored, 10, ignored],
        [12, 13, ignored, ignored, ignored, ignored],
    ]
    assert (batch.tokens, batch.targets_count) == (9, 5)


def test_packed_examples_do_not_see_each_other(base_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model, attn_implementation="sdpa").eval()
    generator = np.random.default_rng(0)
    examples = [(generator.integers(2, 250, size).tolist(), size // 3) for size in (7, 12, 3, 20, 9)]
    split = split_of(*examples)

    def gradients(rows: list[list[int]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = sft.next_token_loss(model, pack.collate(split, rows, pad_id=1))
        loss.backward()
        return loss.item(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    alone, alone_gradient = gradients([[0], [1], [2], [3], [4]])
    packed, packed_gradient = gradients([[3, 0, 2], [1, 4]])
    assert packed == pytest.approx(alone, rel=1e-6)
    torch.testing.assert_close(packed_gradient, alone_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 12), (2, 6), (4, 1), (3, 2)])
def test_a_step_trains_on_the_same_sequences_whatever_the_number_of_ranks(
    ranks: int, batch_size: int
) -> None:
    rows = [[example] for example in range(30)]
    plan = pack.Plan.of(rows, global_batch=12, seed=7, epochs=2.0, max_steps=None)
    seen: list[Any] = []
    for step in range(plan.max_steps):
        mine = [
            list(pack.shares(plan.of_step(step), rank=rank, ranks=ranks, batch_size=batch_size))
            for rank in range(ranks)
        ]
        assert len({len(rounds) for rounds in mine}) == 1
        seen.append([row for rounds in zip(*mine, strict=True) for round_ in rounds for row in round_])
    assert seen == [plan.of_step(step) for step in range(plan.max_steps)]
    assert sorted(row[0] for step in seen for row in step) == sorted([*range(30), *range(30)])


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
