"""Loss and every gradient of tiny models of all families, as the trainer computes them and as the models do with eager attention."""

from __future__ import annotations

from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import families, family_parity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in family_parity.WARNINGS]

PAGE = Path(__file__).parents[3] / "docs" / "finetunejob" / "families.md"
RUNS = (*product((True, False), family_parity.RECOMPUTATIONS),)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with family_parity.on_one_thread() as alone:
        yield alone


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_a_family_learns_what_it_would_by_itself(model_type: str, world: World, tmp_path: Path) -> None:
    family_parity.check(model_type, tmp_path, world, RUNS)


@pytest.mark.parametrize("model_type", families.FAMILIES)
def test_a_family_ranks_as_transformers_does(model_type: str, world: World, tmp_path: Path) -> None:
    expected = families.expected_reward_outcome(model_type)
    assert family_parity.reward_outcome(model_type, tmp_path, world)[: len(expected)] == expected


def test_the_page_names_the_versions_of_the_last_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers {version('transformers')} and torch {version('torch').partition('+')[0]}" in text
