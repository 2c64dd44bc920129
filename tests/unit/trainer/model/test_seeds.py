"""One seed of several numbers."""

from __future__ import annotations

from itertools import product

from finetune_trainer.train.model import seeds


def test_a_seed_is_a_function_of_all_numbers() -> None:
    many = list(product(range(10), repeat=3))
    derived = [seeds.derive(*numbers) for numbers in many]
    assert derived == [seeds.derive(*numbers) for numbers in many]
    assert len(set(derived)) == len(many)
    assert all(0 <= seed < 2**32 for seed in derived)
