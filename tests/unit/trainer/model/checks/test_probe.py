"""The probe of the checks before the first step: documents of any vocabulary, and a key that all ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from finetune_trainer.train.model.checks import probe
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocabulary", [4, 25, 64, 280, 128_256])
def test_the_documents_are_of_the_vocabulary(vocabulary: int) -> None:
    documents = probe.build_documents(vocabulary)
    assert [len(document) for document in documents] == [probe.DOCUMENT_TOKENS] * 3
    tokens = np.concatenate(documents)
    assert 0 <= tokens.min() <= tokens.max() < vocabulary
    assert len(set(tokens.tolist())) == min(vocabulary, len(tokens))


def test_the_documents_leave_out_the_ends_of_the_vocabulary() -> None:
    """There models have special tokens."""
    tokens = np.concatenate(probe.build_documents(128_256))
    assert 128_256 // 4 <= tokens.min() < tokens.max() < 128_256 * 3 // 4


def test_the_documents_do_not_count() -> None:
    """A model may have learned to."""
    for document in probe.build_documents(280):
        assert len(set(np.diff(document).tolist())) > 1


def test_a_batch_has_a_document_in_each_place() -> None:
    first, second = np.array([5, 6, 7]), np.array([8, 9])
    packed = probe.build_batch([first, second], [[0, 1]], CPU)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    padded = probe.build_batch([first, second], [[0], [1]], CPU)
    assert padded.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    # The last token of a document has no target.
    assert (packed.targets_count, padded.targets_count) == (3, 3)


def test_the_result_holds_for_the_same_model_settings_and_device(base_model: Path) -> None:
    """A restart does not repeat the check; a job that carries the run on with other settings does."""
    recipe = networks.recipe(base_model)
    with networks.alone() as world:
        key = probe.compute_key(recipe, world)
        assert key == probe.compute_key(networks.recipe(base_model, logEverySteps=7, maxSteps=9), world)
        assert key != probe.compute_key(
            networks.recipe(base_model, packing=not recipe.training.packing), world
        )
        assert key != probe.compute_key(networks.recipe(base_model, precision="BF16"), world)
        assert key != probe.compute_key(recipe, replace(world, card=Card("H100", 80 * 2**30, (9, 0))))


def test_ranks_on_different_gpus_agree_on_whether_the_result_holds(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise some of them would wait for the others in the check."""
    names = ["A100-SXM4-80GB", "A100-SXM4-40GB", "A100-SXM4-80GB"]
    recipe = networks.recipe(base_model)

    def compute_keys(*names: str) -> set[str]:
        """The keys of all ranks."""
        monkeypatch.setattr(World, "gather", lambda _world, _value: list(names))
        return {
            probe.compute_key(recipe, World(rank, len(names), 0, 1, CPU, card=Card(name, 2**30, (8, 0))))
            for rank, name in enumerate(names)
        }

    keys = compute_keys(*names)
    assert len(keys) == 1
    # Ranks may be on other nodes after a restart.
    assert compute_keys(*reversed(names[:2])) == keys
    assert compute_keys(names[0], names[0]) != keys
