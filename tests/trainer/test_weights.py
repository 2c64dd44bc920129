"""Weights that two ranks read, each its part, and gather."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.train.delivery import export
from support import networks
from support.model_files import KINDS, whole_weights

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


def each_rank_has_its_part(world: World, folders: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    for folder in map(Path, folders.values()):
        network = networks.build(networks.recipe(folder), folder, world)
        local = sum(weight.to_local().numel() for weight in network.parameters())
        assert local < 0.6 * sum(weight.numel() for weight in network.parameters())
        expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        for name, weight in whole_weights(network).items():
            assert torch.equal(weight, expected[name]), (folder.name, name)


def test_two_ranks_have_all_weights_together(base_model: Path, tmp_path: Path) -> None:
    folders = {
        kind: str(save(base_model, tmp_path / kind, **options)) for kind, (save, options) in KINDS.items()
    }
    networks.on_ranks(2, tmp_path / "rendezvous", each_rank_has_its_part, folders)


def gathered_in_half(world: World, half: Path) -> None:
    recipe = networks.recipe(half)
    network = networks.build(recipe, half, world)
    found = export.gather(network.model, half, recipe, world)
    # A tied weight is listed once here.
    masters = {name: weight.full_tensor() for name, weight in network.base.named_parameters()}
    assert {weight.dtype for weight in masters.values()} == {torch.float32}
    expected = {name: weight.bfloat16() for name, weight in masters.items()} if world.leads else {}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rank_0_gathers_the_trained_weights_in_the_type_of_the_base(base_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(half)
    networks.on_ranks(2, tmp_path / "rendezvous", gathered_in_half, half)
