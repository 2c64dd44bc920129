"""What decays, what is compiled, and how ranks are arranged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.optimizer import optimizers
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as found:
        yield found


def test_compilation_needs_a_compiler(
    one_layer: Path, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = networks.build(networks.recipe(one_layer), one_layer, world)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeRefusedError) as refused:
        shard.compile_layers(network)
    assert refused.value.message == (
        "training.compile needs a C++ compiler, and the image has none: set it to false, or trainer.image to one that "
        "has g++"
    )


def test_biases_and_norms_do_not_decay(one_layer: Path, world: World) -> None:
    recipe = networks.recipe(one_layer, weightDecay=0.1, learningRate=1e-3)
    network = networks.build(recipe, one_layer, world)
    (adamw,) = optimizers(network, recipe.training)
    groups = adamw.param_groups
    by_identity = {id(weight): name for name, weight in network.named_parameters()}
    decay = {by_identity[id(weight)]: group["weight_decay"] for group in groups for weight in group["params"]}
    assert set(decay) == set(by_identity.values())
    assert {name for name, rate in decay.items() if rate == 0.0} == {
        name for name in decay if name.endswith(("bias", "norm.weight"))
    }
    assert set(decay.values()) == {0.0, 0.1}
    assert {(group["lr"], group["fused"]) for group in groups} == {(1e-3, True)}


@pytest.mark.parametrize("method", ["LoRA", "PromptTuning"])
def test_what_is_frozen_is_not_optimised(one_layer: Path, world: World, method: str) -> None:
    recipe = networks.recipe(one_layer, method={"type": method}, packing=method == "LoRA")
    network = networks.build(recipe, one_layer, world)
    (adamw,) = optimizers(network, recipe.training)
    optimised = {id(weight) for group in adamw.param_groups for weight in group["params"]}
    names = {name for name, weight in network.named_parameters() if id(weight) in optimised}
    part = "lora_" if method == "LoRA" else "prompt_encoder"
    assert names == {name for name, _ in network.named_parameters() if part in name}
