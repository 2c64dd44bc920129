"""A checkpoint holds what is trained and nothing of a frozen base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.train.checkpoint import checkpointer, shards
from finetune_trainer.train.checkpoint.shards import get_trained_state
from support import networks
from support.checkpoints import Run, same

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


# The layers of QLoRA have tensors beside their frozen weights, which their state has and their parameters do not.
@pytest.mark.parametrize("method", ["Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning"])
def test_the_state_has_the_trained_weights_alone(base_model: Path, method: str) -> None:
    with networks.alone() as world:
        recipe = networks.recipe(base_model, method={"type": method}, packing=method != "PrefixTuning")
        network = networks.build(recipe, base_model, world)
        trained = {
            name for name, weight in network.named_parameters(remove_duplicate=False) if weight.requires_grad
        }
        assert get_trained_state(network).keys() == trained


def test_a_checkpoint_that_has_what_a_frozen_base_was_quantized_with_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def with_more(*arguments: Any) -> dict[str, Any]:
        state = shards.get_training_state(*arguments)
        more = {
            f"{layer}.base_layer.weight.{name}": torch.ones(4)
            for layer in "01"
            for name in ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4")
        }
        return {**state, "model": {**state["model"], **more}}

    with networks.alone() as world:
        run = Run(tmp_path, world)
        with monkeypatch.context() as older:
            older.setattr(checkpointer, "get_training_state", with_more)
            run.train_and_save(1)
        again = Run(tmp_path, world)
        assert again.resume().step == 1
        assert same(again.state(), run.state())


def test_writing_waits_for_no_stream_of_a_gpu(tmp_path: Path) -> None:
    """As torch's own staging: what it writes is on the host."""
    assert shards.Writer(str(tmp_path)).per_thread_copy_ahead == 0
