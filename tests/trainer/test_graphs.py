"""How many graphs `training.compile` makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.train import graphs
from finetune_trainer.train.runtime.device import Card
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    # What dynamo reads of every tensor, and of what is computed once.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]


def test_a_kind_of_layer_has_at_most_two_graphs_over_packs_of_different_lengths(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with the number of documents of the first pack, and one for any number.

    Four packs make both; the long tests have twenty, and the other methods.
    """
    monkeypatch.setattr(graphs, "_PACKS", 4)
    recipe = networks.recipe(base_model, method={"type": "LoRA"}, precision="BF16", compile=True)
    graph_count, kinds = graphs.count_graphs(
        recipe, base_model, Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0))
    )
    assert kinds == 1
    assert 1 <= graph_count <= 2 * kinds
