"""Loss and gradients of twenty families as the trainer computes them; tests/long has all families and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.multiprocessing import ProcessRaisedException

from finetune_trainer.train.model.network import attention
from support import families, family_parity, networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in family_parity.WARNINGS]

# Each family packed and not, and with both recomputations.
RUNS = ((True, "Selective"), (False, "Full"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with family_parity.on_one_thread() as alone:
        yield alone


@pytest.mark.parametrize("model_type", families.COMMON)
def test_a_family_learns_what_it_would_by_itself(model_type: str, world: World, tmp_path: Path) -> None:
    family_parity.check(model_type, tmp_path, world, RUNS)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_moe"])
def test_a_family_ranks_as_transformers_does(model_type: str, world: World, tmp_path: Path) -> None:
    assert family_parity.reward_outcome(model_type, tmp_path, world) == families.TRAINED


def build_with_attention_of_packed_rows(world: World, base: Path) -> None:
    """Give a family the attention that `isolate` refuses it."""

    def isolate(model: Any, **_: object) -> bool:
        model.set_attn_implementation(attention.register())
        return True

    attention.isolate = isolate
    networks.build(networks.recipe(base), base, world)


def test_all_ranks_refuse_a_family_whose_attention_ignores_arguments(tmp_path: Path) -> None:
    base = families.save("nemotron", tmp_path / "base")
    with pytest.raises(ProcessRaisedException, match="is a nemotron, whose forward pass fails in training"):
        networks.on_ranks(2, tmp_path / "rendezvous", build_with_attention_of_packed_rows, base)
