"""What decays, what is compiled, and how ranks are arranged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import networks
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train import pack, shard
from finetune_trainer.train.network import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as found:
        yield found


@pytest.fixture(scope="module")
def one_layer(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with its first layer alone, and with biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from finetune_trainer.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("one-layer")
    config = LlamaConfig.from_pretrained(base_model)
    config.num_hidden_layers, config.attention_bias = 1, True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(networks.recipe(base_model).model, base_model).save_pretrained(folder)
    return folder


def learned(network: Any, batch: pack.Batch) -> tuple[float, list[torch.Tensor]]:
    loss, _ = network(batch)
    loss.backward()
    slopes = [weight.grad.full_tensor().clone() for weight in network.parameters()]
    network.zero_grad()
    return loss.item(), slopes


def two_batches() -> list[pack.Batch]:
    split = networks.random_split(examples=12)
    return [pack.collate(split, rows, pad_id=0, width=64) for rows in ([[0, 1]], [[2, 3]])]


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_compute_as_eager_ones(one_layer: Path, world: World) -> None:
    """Trap 15: each layer by itself and in place, so that names of weights stay, and rows of one length."""
    eager = networks.build(networks.recipe(one_layer), one_layer, world)
    compiled = networks.build(networks.recipe(one_layer, compile=True), one_layer, world)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in eager.named_parameters()]
    for batch in two_batches():
        (loss, slopes), (expected, expected_slopes) = learned(compiled, batch), learned(eager, batch)
        assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(slopes, expected_slopes, rtol=1e-4, atol=1e-5)
    assert all(layer.forward is not type(layer).forward for layer in decoder_layers(compiled))


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
    groups = shard.optimizer(network, recipe.training).param_groups
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
    optimised = {
        id(weight)
        for group in shard.optimizer(network, recipe.training).param_groups
        for weight in group["params"]
    }
    names = {name for name, weight in network.named_parameters() if id(weight) in optimised}
    part = "lora_" if method == "LoRA" else "prompt_encoder"
    assert names == {name for name, _ in network.named_parameters() if part in name}


def meshes(world: World, folder: Path) -> None:
    shapes = {kind: tuple(shard.mesh(kind, world).shape) for kind in ("FSDP", "HSDP", "DDP")}
    assert shapes == {"FSDP": (4,), "HSDP": (2, 2), "DDP": (4, 1)}
    # Ranks 0 and 1 are one pod, and shard between them.
    assert shard.mesh("HSDP", world).mesh.tolist() == [[0, 1], [2, 3]]


def test_ranks_are_replicas_times_shards(tmp_path: Path) -> None:
    networks.on_ranks(4, tmp_path / "rendezvous", meshes, tmp_path)
