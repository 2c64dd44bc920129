"""What is sharded, what is gathered when, what decays, and what is compiled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.data import pack
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.network.trained_network import Network, decoder_layers
from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


def test_compilation_needs_a_compiler(
    one_layer: Path, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network = networks.build(networks.recipe(one_layer), one_layer, world)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeRefusedError) as refused:
        shard.compile_layers(network)
    assert refused.value.message == (
        "training.compile requires a C++ compiler, and the image does not have one: set training.compile to false, "
        "or set pods.train.image to an image with g++"
    )


def gathered_during_a_step(network: Network) -> dict[str, tuple[bool, bool]]:
    """Whether the weights of the embedding and of the output layer are gathered, at moments of a step."""
    ends = (network.base.get_input_embeddings(), network.base.get_output_embeddings())
    is_gathered: dict[str, tuple[bool, bool]] = {}

    def see(moment: str) -> None:
        is_gathered[moment] = (
            not isinstance(ends[0].weight, DTensor),
            not isinstance(ends[1].weight, DTensor),
        )

    class Seen(Sft):
        def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            see("loss")
            return super().__call__(*arguments)

    network.objective = Seen()
    (layer,) = decoder_layers(network)
    layer.register_forward_hook(lambda *_: see("forward"))
    layer.register_full_backward_hook(lambda *_: see("backward"))
    batch = pack.collate(networks.random_split(), [[0], [1]], pad_id=0)
    network.train()(batch)[0].backward()
    see("optimizer")
    with network.no_grad_forward():
        network(batch)
        see("evaluation")
    see("end")
    return is_gathered


def test_ends_are_gathered_only_while_they_compute(one_layer: Path, world: World, tmp_path: Path) -> None:
    """Tied ones are gathered from the beginning of a step to its end."""
    shutil.copytree(one_layer, tmp_path / "untied")
    model = AutoModelForCausalLM.from_pretrained(one_layer, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "untied")
    tied, untied = (
        gathered_during_a_step(networks.build(networks.recipe(base), base, world))
        for base in (one_layer, tmp_path / "untied")
    )
    both, neither = (True, True), (False, False)
    assert tied == {
        "forward": both, "loss": both, "backward": both, "optimizer": neither, "evaluation": both, "end": neither
    }  # fmt: skip
    # An evaluation keeps the output layer for the next batch.
    assert untied == {
        "forward": neither, "loss": (False, True), "backward": neither, "optimizer": neither, "evaluation": (False, True),
        "end": neither
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["FSDP", "DDP"])
def test_on_one_shard_frozen_weights_stay_outside_of_fsdp(
    one_layer: Path, world: World, strategy: str
) -> None:
    """FSDP would copy them before each use."""
    recipe = networks.recipe(one_layer, method={"type": "LoRA"}, strategy=strategy)
    network = networks.build(recipe, one_layer, world)
    assert sharded_weights(network) == {"frozen": {False}, "trained": {True}}
    assert network.base.get_input_embeddings().weight is network.base.get_output_embeddings().weight


def test_frozen_weights_of_another_dtype_stay_in_fsdp_which_casts_them(world: World) -> None:
    network = Network(networks.small_llama().requires_grad_(False), Sft())
    network.base.model.norm.weight.data = network.base.model.norm.weight.data.bfloat16()
    shard.shard(network, shard.build_mesh("FSDP", world), "FP32")
    sharded_names = {name for name, weight in network.base.named_parameters() if isinstance(weight, DTensor)}
    assert sharded_names == {"model.norm.weight"}


def sharded_weights(network: Network) -> dict[str, set[bool]]:
    """Whether the frozen weights, and the trained weights, are sharded."""
    return {
        "frozen": {isinstance(each, DTensor) for each in network.parameters() if not each.requires_grad},
        "trained": {isinstance(each, DTensor) for each in network.parameters() if each.requires_grad},
    }


def test_biases_and_norms_do_not_decay(one_layer: Path, world: World) -> None:
    recipe = networks.recipe(one_layer, weightDecay=0.1, learningRate=1e-3)
    network = networks.build(recipe, one_layer, world)
    (adamw,) = build_optimizers(network, recipe.training)
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
def test_what_is_frozen_is_not_optimized(one_layer: Path, world: World, method: str) -> None:
    recipe = networks.recipe(one_layer, method={"type": method}, packing=method == "LoRA")
    network = networks.build(recipe, one_layer, world)
    (adamw,) = build_optimizers(network, recipe.training)
    optimized = {id(weight) for group in adamw.param_groups for weight in group["params"]}
    names = {name for name, weight in network.named_parameters() if id(weight) in optimized}
    part = "lora_" if method == "LoRA" else "prompt_encoder"
    assert names == {name for name, _ in network.named_parameters() if part in name}
