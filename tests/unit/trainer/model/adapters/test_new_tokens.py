"""Rows for new tokens: those of transformers, whichever rank reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.train.model.adapters.new_tokens import ExtendedWeight, NewTokens
from finetune_trainer.train.model.weights import load
from support import networks
from support.model_files import saved

if TYPE_CHECKING:
    from pathlib import Path

ADDED = ["<tool>", "</tool>", "<think>"]
# Of its noise, whose standard deviation is 3e-5 of the embedding's.
_DEVIATIONS = 2e-4


def new_of(base: Path, added: list[str]) -> NewTokens:
    spec = networks.recipe(base).model.model_copy(update={"new_tokens": added})
    return NewTokens.of(spec, load_tokenizer(spec, base))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_grows_as_with_transformers(tied: bool, base_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(base_model, tmp_path / "base", tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    before = expected.config.vocab_size
    expected.resize_token_embeddings(before + len(ADDED))
    ours = AutoModelForCausalLM.from_pretrained(folder)
    new = new_of(folder, ADDED)
    assert new.ids == (before, before + 1, before + 2)
    new.enlarge(ours)
    assert ours.config.vocab_size == before + len(ADDED)
    ends = (ours.get_input_embeddings(), ours.get_output_embeddings())
    assert (ends[0].weight is ends[1].weight) == tied
    torch.testing.assert_close(ours.state_dict(), expected.state_dict(), rtol=0, atol=_DEVIATIONS)
    assert ours(torch.tensor([[5, before + 2]])).logits.shape == (1, 2, before + len(ADDED))


def test_rows_to_spare_are_used(base_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_model)
    vocabulary = model.config.vocab_size
    model.resize_token_embeddings(vocabulary + 2)
    before = model.get_input_embeddings().weight.detach().clone()
    new = new_of(base_model, ADDED[:1])
    new.enlarge(model)
    expected = before.clone()
    expected[vocabulary] = before.mean(dim=0)
    torch.testing.assert_close(model.get_input_embeddings().weight.detach(), expected)
    assert NewTokens().count_rows(vocabulary) == vocabulary


@pytest.mark.parametrize("shape", [(10, 4), (10,)], ids=["weight", "bias"])
def test_ranks_read_the_rows_of_the_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    part = torch.randn(shape)
    new = NewTokens((8, 10, 11))
    extended = torch.cat([part, part[:2]])
    extended[[8, 10, 11]] = part.mean(dim=0)
    grown = ExtendedWeight(part, new)
    assert grown.shape == [12, *shape[1:]]
    for ranks in (1, 2, 3, 5, 12):
        read = torch.cat([grown[slice(at, at + 12 // ranks + 1)] for at in range(0, 12, 12 // ranks + 1)])
        torch.testing.assert_close(read, extended)
    half: Any = ExtendedWeight(part.bfloat16(), new)[:]
    assert half.dtype == torch.bfloat16


def test_a_base_grows_before_it_has_weights(base_model: Path) -> None:
    recipe = networks.recipe(base_model)
    with networks.alone() as world:
        model = load.build_skeleton(recipe, base_model, world)
    vocabulary = model.config.vocab_size
    new_of(base_model, ADDED).enlarge(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert (model.get_input_embeddings().weight.shape[0], model.device.type) == (vocabulary + 3, "meta")
