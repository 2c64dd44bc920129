"""What a job recomputes so that it fits; the error for a job that does not fit names one that does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.memory import estimate, fit, suggestions
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network import chunked_loss
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.shapes import llama_shapes, small_shape

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    return llama_shapes()


BASE = Path("/base")
WORLD = World(0, 1, 0, 1, torch.device("cpu"))
ON_A_GPU = World(0, 16, 0, 8, torch.device("cpu"), card=Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0)))


def chosen(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, limit: float, world: World = WORLD) -> str:
    monkeypatch.setattr(fit, "read_memory_limit", lambda _world: limit)
    return fit.choose(Network(networks.small_llama(), Sft()), recipe, world, 2048, None).kind


def need(recompute: str, **training: Any) -> float:
    recipe = networks.recipe(BASE, **training)
    shape = small_shape()
    return estimate.estimate(shape, recipe, shards=1, row_tokens=2048, recompute=recompute).total / 0.92 + 1


# Which model and precision, where it is trained, of how much memory in GiB, and what is chosen.
CHUNKS: dict[str, tuple[str, str, World, float, tuple[str, int]]] = {
    "trained on a GPU": ("8B Full", "BF16", ON_A_GPU, 80, ("None", chunked_loss.LARGE_CHUNK_NUMBERS)),
    "beside low-rank layers": ("8B whole", "BF16", ON_A_GPU, 80, ("None", chunked_loss.LARGE_CHUNK_NUMBERS)),
    # Recomputation costs more time than small chunks.
    "less recomputation comes first": (
        "8B Full",
        "BF16",
        ON_A_GPU,
        40,
        ("None", chunked_loss.SMALL_CHUNK_NUMBERS),
    ),
    "frozen": ("8B LoRA", "BF16", ON_A_GPU, 80, ("None", chunked_loss.SMALL_CHUNK_NUMBERS)),
    "on CPUs": (
        "8B Full",
        "BF16",
        World(0, 16, 0, 8, torch.device("cpu")),
        80,
        ("None", chunked_loss.SMALL_CHUNK_NUMBERS),
    ),
    "sums that FP16 cannot hold": (
        "8B Full",
        "FP16",
        ON_A_GPU,
        80,
        ("None", chunked_loss.SMALL_CHUNK_NUMBERS),
    ),
    "too little to spare": ("8B Full", "BF16", ON_A_GPU, 45, ("None", chunked_loss.SMALL_CHUNK_NUMBERS)),
}


@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_are_large_where_the_output_layer_is_trained_and_they_fit(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, Shape], case: str
) -> None:
    name, precision, world, limit, expected = CHUNKS[case]
    monkeypatch.setattr(fit, "read_memory_limit", lambda _world: limit * 2**30)
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes[name])
    recipe = networks.recipe(BASE, precision=precision, perDeviceBatchSize=1, activationCheckpointing="Auto")
    choice = fit.decide(Network(networks.small_llama(), Sft()), recipe, world, 4096, None)
    assert (choice.kind, choice.chunk_numbers) == expected
    assert choice.estimate.total <= choice.limit
    assert choice.chunk == choice.chunk_numbers // 128256


def test_ranks_on_different_gpus_make_the_choice_of_the_smallest(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, Shape], capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise they would recompute different layers, and only some of them would check it."""
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes["8B Full"])
    recipe = networks.recipe(BASE, precision="BF16", perDeviceBatchSize=1, activationCheckpointing="Auto")
    worlds = [
        World(rank, 16, 0, 8, torch.device("cpu"), card=Card("NVIDIA-A100", memory_gib * 2**30, (8, 0)))
        for rank, memory_gib in enumerate((80, 24, 40))
    ]
    choices = [
        fit.decide(Network(networks.small_llama(), Sft()), recipe, world, 4096, None) for world in worlds
    ]
    assert [choice.kind for choice in choices] == ["None", "Selective", "None"]
    monkeypatch.setattr(World, "gather", lambda _world, _choice: choices)
    assert [fit.agree(choice, world) for choice, world in zip(choices, worlds, strict=True)] == 3 * [
        choices[1]
    ]
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"memory of the smallest rank: about {choices[1].estimate} of 22.1 GiB; ")
    assert "activation checkpointing Selective; " in line
    # The same GPU everywhere: nothing to say.
    choices = choices[:1]
    assert fit.agree(choices[0], worlds[0]) == choices[0]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("kind", fit.KINDS)
def test_auto_recomputes_no_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = networks.recipe(BASE, activationCheckpointing="Auto")
    assert chosen(monkeypatch, auto, need(kind)) == kind
    assert f"activation checkpointing {kind}; " in capsys.readouterr().out
    explicit_recipe = networks.recipe(BASE, activationCheckpointing=kind)
    assert chosen(monkeypatch, explicit_recipe, 1e15) == kind


@pytest.mark.parametrize(
    ("changes", "world", "limit", "sentence"),
    [
        (
            {},
            WORLD,
            need("Full"),
            "the job needs about 1.2 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 1.2, gathered "
            "layers 0.0, logits 0.0), but a rank has 0.2 GiB: what would fit: training.activationCheckpointing Full (or Auto)",
        ),
        (
            {"activationCheckpointing": "Auto"},
            WORLD,
            need("Full", perDeviceBatchSize=1),
            "the job needs about 0.2 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 0.1, gathered "
            "layers 0.0, logits 0.0), but a rank has 0.1 GiB: what would fit: training.perDeviceBatchSize 1 with activationCheckpointing "
            "Full",
        ),
        (
            {"perDeviceBatchSize": 1, "method": {"type": "LoRA"}},
            WORLD,
            1.0,
            "the job needs about 0.3 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 0.3, gathered "
            "layers 0.0, logits 0.0), but a rank has 0.0 GiB: use a smaller model, or lower training.maxLength",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], world: World, limit: float, sentence: str
) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        chosen(monkeypatch, networks.recipe(BASE, **changes), limit, world)
    assert (refused.value.reason, refused.value.message) == ("OutOfMemory", sentence)


def test_a_model_of_8b_does_not_fit_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, Shape]
) -> None:
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes["8B Full"])
    recipe = networks.recipe(BASE, precision="BF16", activationCheckpointing="Auto")
    with pytest.raises(RecipeRefusedError) as refused:
        chosen(monkeypatch, recipe, 80 * 2**30)
    assert refused.value.message == (
        "the job needs about 122.6 GiB a rank (weights 29.9, gradients 29.9, optimizer 59.8, activations 0.0, gathered "
        "layers 2.9, logits 0.0), but a rank has 73.6 GiB: what would fit: 2 ranks with FSDP; training.optimizer.type AdamW8bit with "
        "weights BF16; method LoRA"
    )


def test_an_adapter_is_suggested_by_what_it_trains(shapes: dict[str, Shape]) -> None:
    full, lora = (
        estimate.estimate(
            shape, networks.recipe(BASE, precision="BF16"), shards=2, row_tokens=2048, recompute="Full"
        )
        for shape in (suggestions._with_adapter(shapes["8B Full"]), shapes["8B LoRA"])
    )
    assert full.logits == lora.logits
    assert full.gathered == pytest.approx(lora.gathered, rel=0.05)


def test_momentum_is_not_suggested_beside_adamw(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, Shape]
) -> None:
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes["8B Full"])
    recipe = networks.recipe(BASE, precision="BF16", optimizer={"type": "Muon", "momentum": 0.9})
    with pytest.raises(RecipeRefusedError) as refused:
        chosen(monkeypatch, recipe, 80 * 2**30)
    assert "; training.optimizer.type AdamW8bit with weights BF16 without momentum; " in refused.value.message


def test_a_model_of_8b_fits_on_one_gpu_with_8_bits_and_bf16_weights(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, Shape], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes["8B Full"])
    recipe = networks.recipe(
        BASE,
        precision="BF16",
        activationCheckpointing="Auto",
        optimizer={"type": "AdamW8bit", "weights": "BF16"},
    )
    assert chosen(monkeypatch, recipe, 80 * 2**30) == "Selective"
    assert capsys.readouterr().out == (
        "memory: about 55.7 GiB a rank (weights 15.0, gradients 3.2, optimizer 18.1, activations 18.6, gathered layers 0.8, "
        "logits 0.0) of 73.6 GiB; activation checkpointing Selective; logits of 261 tokens at a time\n"
    )


def test_replicas_are_told_of_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP holds everything on each rank; FSDP over the same ranks would fit."""
    many = World(0, 64, 0, 8, torch.device("cpu"))
    recipe = networks.recipe(BASE, strategy="DDP", perDeviceBatchSize=1, activationCheckpointing="Full")
    shape = small_shape()
    limit = estimate.estimate(shape, recipe, shards=64, row_tokens=2048, recompute="Full").total / 0.92 + 1
    with pytest.raises(RecipeRefusedError, match=r"what would fit: distributed\.strategy FSDP;"):
        chosen(monkeypatch, recipe, limit, many)


def test_ranks_of_a_pod_share_its_memory() -> None:
    alone, shared = (fit.read_memory_limit(World(0, size, 0, size, torch.device("cpu"))) for size in (1, 4))
    assert 0 < shared == alone / 4 < float("inf")
