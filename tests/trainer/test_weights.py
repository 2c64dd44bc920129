"""Weights that two ranks read, each its part, and gather."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.train.delivery import export
from support import networks
from support.model_files import EXPERTS, KINDS, READ_BY_RANK_0, whole_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


def counted(read: list[int]) -> None:
    """Count the bytes that are read of files."""
    from finetune_trainer.train.model.weights.stored_tensors import Stored

    of_file = Stored.__getitem__

    def with_count(self: Stored, at: slice) -> torch.Tensor:
        tensor = of_file(self, at)
        read.append(tensor.nbytes)
        return tensor

    Stored.__getitem__ = with_count  # type: ignore[method-assign]


def each_rank_has_its_part(world: World, folders: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    read: list[int] = []
    counted(read)
    for kind, folder in ((kind, Path(folder)) for kind, folder in folders.items()):
        read.clear()
        network = networks.build(networks.recipe(folder), folder, world)
        expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        weights = list(network.parameters())
        share = sum(weight.to_local().numel() for weight in weights) / sum(
            weight.numel() for weight in weights
        )
        assert share < 1.2 / world.size
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert (sum(read) == 0) == (kind in READ_BY_RANK_0)
        assert sum(read) < 1.2 / world.size * max(stored, 1), (kind, sum(read), stored)
        for name, weight in whole_weights(network).items():
            assert torch.equal(weight, expected[name]), (kind, name)


@pytest.mark.parametrize(("ranks", "kinds"), [(2, KINDS), (4, EXPERTS)], ids=["2 ranks", "4 ranks"])
def test_ranks_have_all_weights_together_and_read_their_parts(
    ranks: int, kinds: Iterable[str], base_model: Path, tmp_path: Path
) -> None:
    folders = {}
    for kind in kinds:
        save, options = KINDS[kind]
        folders[kind] = str(save(base_model, tmp_path / kind, **options))
    networks.on_ranks(ranks, tmp_path / "rendezvous", each_rank_has_its_part, folders)


def gathered_in_half(world: World, half: Path) -> None:
    recipe = networks.recipe(half)
    network = networks.build(recipe, half, world)
    weights = export.gather_weights(network.model, half, recipe, world)
    # A tied weight is listed once here.
    masters = {name: weight.full_tensor() for name, weight in network.base.named_parameters()}
    assert {weight.dtype for weight in masters.values()} == {torch.float32}
    expected = {name: weight.bfloat16() for name, weight in masters.items()} if world.leads else {}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_rank_0_gathers_the_trained_weights_in_the_type_of_the_base(base_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(half)
    networks.on_ranks(2, tmp_path / "rendezvous", gathered_in_half, half)
