"""The memory of a job is estimated before loading; the error for a job that does not fit names one that does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from finetune_crds.checkpoint import Checkpoint
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train import build
from finetune_trainer.train.checkpoint import shards
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.adapters import adapt, pissa
from finetune_trainer.train.model.checks import recomputation
from finetune_trainer.train.model.memory import accounting, estimate
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network import attention, chunked_loss
from finetune_trainer.train.model.network.lm_head import Head
from finetune_trainer.train.model.network.trained_network import Network, trained_parameters
from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.pods import save_base_model
from support.shapes import ADAPTER_8B, ENDS_8B, LLAMA_8B, LLAMA_70B, PARAMETERS, shape_of

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

BASE = Path("/base")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "base"
    save_base_model(folder, width=256)
    return folder


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    return {
        "8B Full": shape_of(LLAMA_8B, "Full"),
        "8B LoRA": shape_of(LLAMA_8B, "LoRA"),
        "8B whole": shape_of(LLAMA_8B, "LoRA", {"modulesToSave": ["embed_tokens", "lm_head"]}),
        "8B PiSSA": shape_of(LLAMA_8B, "LoRA", {"init": "PiSSA"}),
        "70B Full": shape_of(LLAMA_70B, "Full"),
    }


@pytest.mark.parametrize("shards", [1, 8, 64])
@pytest.mark.parametrize(
    ("kind", "weights", "trained"),
    [
        # Full: fp32 weights. LoRA: bf16 weights under an fp32 adapter.
        ("8B Full", 4 * PARAMETERS["8B"], PARAMETERS["8B"]),
        ("8B LoRA", 2 * PARAMETERS["8B"] + 4 * ADAPTER_8B, ADAPTER_8B),
        ("8B PiSSA", 2 * PARAMETERS["8B"] + 8 * ADAPTER_8B, ADAPTER_8B),
        ("8B whole", 2 * PARAMETERS["8B"] + 4 * (ADAPTER_8B + ENDS_8B), ADAPTER_8B + ENDS_8B),
        ("70B Full", 4 * PARAMETERS["70B"], PARAMETERS["70B"]),
    ],
)
def test_what_is_sharded_is_shared_out(
    shapes: dict[str, Shape], kind: str, weights: int, trained: int, shards: int
) -> None:
    recipe = networks.recipe(BASE, precision="BF16", perDeviceBatchSize=1)
    memory = estimate.estimate(shapes[kind], recipe, shards=shards, row_tokens=2048, recompute="Full")
    assert (memory.weights, memory.optimizer) == (weights / shards, 8 * trained / shards)
    if kind == "70B Full" and shards == 1:
        # Gradients are all there at the end of the backward pass.
        assert memory.gradients == 4 * trained
    assert memory.total == sum(
        (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.layer, memory.loss)
    )


EMBEDDING_8B = 128256 * 4096
OF_8_BITS = 2.03125 + (8 - 2.03125) * EMBEDDING_8B / PARAMETERS["8B"]
# Bytes a parameter of weights, of gradients and of what the optimizer keeps.
BYTES: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    # Two bytes, and eight of the embedding.
    "AdamW8bit": ({"type": "AdamW8bit"}, (4, 4, OF_8_BITS)),
    "AdamW of bf16 weights": ({"weights": "BF16"}, (2, 2, 8)),
    "AdamW8bit of bf16 weights": ({"type": "AdamW8bit", "weights": "BF16"}, (2, 2, OF_8_BITS)),
}


@pytest.mark.parametrize(("spec", "each"), BYTES.values(), ids=BYTES)
def test_an_optimizer_needs_what_it_keeps(
    shapes: dict[str, Shape], spec: dict[str, Any], each: tuple[float, float, float]
) -> None:
    recipe = networks.recipe(BASE, precision="BF16", optimizer=spec)
    # With few tokens a rank needs most at the end of the backward pass, when all gradients are there.
    memory = estimate.estimate(shapes["8B Full"], recipe, shards=1, row_tokens=64, recompute="Full")
    assert (memory.weights, memory.gradients, memory.optimizer) == tuple(
        PARAMETERS["8B"] * size for size in each
    )


def test_muon_keeps_one_number_of_each_matrix(shapes: dict[str, Shape]) -> None:
    recipe = networks.recipe(BASE, precision="BF16", optimizer={"type": "Muon"})
    shape = shapes["8B Full"]
    # Norms are left to AdamW: two a layer, and the last.
    assert shape.matrices == PARAMETERS["8B"] - ENDS_8B - 65 * 4096
    memory = estimate.estimate(shape, recipe, shards=8, row_tokens=2048, recompute="Full")
    assert memory.optimizer == (4 * shape.matrices + 8 * (PARAMETERS["8B"] - shape.matrices)) / 8


PISSA = {"type": "LoRA", "lora": {"init": "PiSSA"}}


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ({}, None),
        ({"type": "AdamW8bit"}, None),
        ({"type": "AdamW8bit", "weights": "BF16"}, None),
        ({}, PISSA),
    ],
)
def test_the_optimizer_is_as_large_as_estimated(
    base: Path, spec: dict[str, Any], method: dict[str, Any] | None
) -> None:
    """What the state of one step holds, of a model with rows of 256 and 512 numbers."""
    recipe = networks.recipe(base, precision="BF16", optimizer=spec, method=method)
    with networks.alone() as world:
        network = networks.build(recipe, base, world)
        shape = Shape.of(network, None, quantized=False)
        memory = estimate.estimate(shape, recipe, shards=1, row_tokens=64, recompute="None")
        parts = build_optimizers(network, recipe.training)
        for weight in trained_parameters(network):
            weight.grad = torch.zeros_like(weight)
        for part in parts:
            part.step()
        states = [state for part in parts for state in part.state.values()]
        state_bytes = sum(value.nbytes for state in states for value in state.values())
        initial = [value for name, value in network.named_buffers() if pissa.is_initial(name)]
        weights = sum(weight.nbytes for weight in (*network.parameters(), *initial))
        state, _ = tree_flatten(
            shards.build_stager(pinned=False).stage(shards.get_training_state(network, parts))
        )
        # A tied weight has two names and one copy.
        local = [value.to_local() if isinstance(value, DTensor) else value for value in state]
        copies = [value.untyped_storage() for value in local if isinstance(value, torch.Tensor)]
        copied = sum({copy.data_ptr(): copy.nbytes() for copy in copies}.values())
    checkpointed = recipe.model_copy(update={"checkpoint": Checkpoint(uri="/checkpoints")})
    assert copied == pytest.approx(estimate.estimate_staged_bytes(shape, checkpointed, shards=1), rel=0.02)
    assert state_bytes == pytest.approx(memory.optimizer, rel=0.02)
    assert weights == memory.weights


def test_a_four_bit_base_is_whole_on_each_rank() -> None:
    linear, ends = PARAMETERS["8B"] - ENDS_8B, ENDS_8B
    stored = linear // 2 + 2 * ends
    shape = Shape(
        parameters=linear // 2 + ends + ADAPTER_8B,
        trained=ADAPTER_8B,
        unsharded=linear // 2 + ends,
        unsharded_bytes=stored,
        teacher=0,
        layers=32,
        width=4096,
        feed_forward=14336,
        embedding=ends // 2,
        output=ends // 2,
    )
    recipe = networks.recipe(BASE, method={"type": "QLoRA"}, precision="BF16", perDeviceBatchSize=1)
    estimates = {
        shards: estimate.estimate(shape, recipe, shards=shards, row_tokens=2048, recompute="Full")
        for shards in (1, 8)
    }
    assert {shards: each.weights for shards, each in estimates.items()} == {
        shards: stored + 4 * ADAPTER_8B / shards for shards in estimates
    }
    assert 5e9 < estimates[1].total < 10e9


def small(width: int = 128) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )


def kept_by_a_forward_pass(network: Network, batch: pack.Batch) -> int:
    """Bytes that are allocated when it has ended, and were not before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        hidden = network.compute_hidden_states(batch)
    assert hidden.requires_grad
    return sum(
        event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    )


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize("method", ["Full", "LoRA"])
@pytest.mark.parametrize("recompute", estimate.KINDS)
def test_activations_are_estimated_within_a_factor_of_two(
    method: str, recompute: Recomputation, precision: str
) -> None:
    recipe = networks.recipe(BASE, method={"type": method}, precision=precision, perDeviceBatchSize=2)
    model = small().to(torch.bfloat16 if precision == "BF16" else torch.float32).train()
    attention.isolate(model, card=None, half=False, soft_prompt=False)
    adapted = adapt.adapt(model, recipe.method, "base")
    recomputation.enable(adapted, recompute)
    network = Network(adapted, Sft())
    batch = pack.collate(networks.of_documents([3] * 256, [4] * 256), [[0], [1]], pad_id=0)
    network(batch)[0].backward()
    measured = kept_by_a_forward_pass(network, batch)
    shape = Shape.of(network, None, quantized=False)
    estimated = estimate.estimate_activation_bytes(shape, 2 * 256, 2 if precision == "BF16" else 4, recompute)
    assert measured / 2 < estimated < measured * 2


@pytest.mark.parametrize(
    ("objective", "precision"),
    [("SFT", "BF16"), ("DPO", "BF16"), ("SFT", "FP16"), ("Distillation", "BF16"), ("Distillation", "FP32")],
)
def test_a_logit_takes_the_bytes_that_are_estimated(objective: str, precision: str) -> None:
    """In one chunk, beside which hidden states of width 8 are small."""
    spec = {"distillation": {"teacher": "/teacher"}} if objective == "Distillation" else {}
    recipe = networks.recipe(BASE, objective={"type": objective, **spec}, precision=precision)
    dtype = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}[precision]
    tokens, width, vocabulary = 200, 8, 20_000
    config: Any = SimpleNamespace(vocab_size=vocabulary)
    config.get_text_config = lambda: config

    def head() -> Head:
        layer = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        base: Any = SimpleNamespace(config=config, get_output_embeddings=lambda: layer)
        return Head(base)

    targets, taught = torch.arange(tokens), torch.randn(tokens, width, dtype=dtype)
    batch: Any = SimpleNamespace(
        targets=targets,
        owners=torch.arange(tokens) % 2,
        at_targets=lambda values: values,
        examples=[0],
        reference=torch.zeros(1, 2),
    )

    class Teacher:
        head: Head

        def __call__(self, _batch: object) -> tuple[torch.Tensor, None]:
            return taught, None

        def free_gathered_weights(self) -> None:
            """It is not sharded."""

    teacher: Any = Teacher()
    teacher.head = head()
    network: Any = SimpleNamespace(head=head(), training=True)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    with accounting.Accounting(torch.device("cpu")) as account:
        build.build_objective(recipe, teacher)(network, batch, hidden)
    numbers = tokens * vocabulary
    assert sum(account.compute_peak().values()) / numbers == pytest.approx(
        estimate._bytes_per_logit(recipe), rel=0.05
    )


WORLD = World(0, 1, 0, 1, torch.device("cpu"))
ON_A_GPU = World(0, 16, 0, 8, torch.device("cpu"), card=Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0)))


def chosen(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, limit: float, world: World = WORLD) -> str:
    monkeypatch.setattr(estimate, "read_memory_limit", lambda _world: limit)
    return estimate.choose(Network(small(), Sft()), recipe, world, 2048, None).kind


def need(recompute: str, **training: Any) -> float:
    recipe = networks.recipe(BASE, **training)
    shape = Shape.of(Network(small(), Sft()), None, quantized=False)
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
    monkeypatch.setattr(estimate, "read_memory_limit", lambda _world: limit * 2**30)
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shapes[name])
    recipe = networks.recipe(BASE, precision=precision, perDeviceBatchSize=1, activationCheckpointing="Auto")
    choice = estimate.decide(Network(small(), Sft()), recipe, world, 4096, None)
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
    choices = [estimate.decide(Network(small(), Sft()), recipe, world, 4096, None) for world in worlds]
    assert [choice.kind for choice in choices] == ["None", "Selective", "None"]
    monkeypatch.setattr(World, "gather", lambda _world, _choice: choices)
    assert [estimate.agree(choice, world) for choice, world in zip(choices, worlds, strict=True)] == 3 * [
        choices[1]
    ]
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"memory of the smallest rank: about {choices[1].estimate} of 22.1 GiB; ")
    assert "activation checkpointing Selective; " in line
    # The same GPU everywhere: nothing to say.
    choices = choices[:1]
    assert estimate.agree(choices[0], worlds[0]) == choices[0]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("kind", estimate.KINDS)
def test_auto_recomputes_no_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = networks.recipe(BASE, activationCheckpointing="Auto")
    assert chosen(monkeypatch, auto, need(kind)) == kind
    assert f"activation checkpointing {kind}; " in capsys.readouterr().out
    asked = networks.recipe(BASE, activationCheckpointing=kind)
    assert chosen(monkeypatch, asked, 1e15) == kind


@pytest.mark.parametrize(
    ("changes", "world", "limit", "sentence"),
    [
        (
            {},
            WORLD,
            need("Full"),
            "the job needs about 1.2 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 1.2, gathered "
            "layers 0.0, loss 0.0), but a rank has 0.2 GiB: what would fit: training.activationCheckpointing Full (or Auto)",
        ),
        (
            {"activationCheckpointing": "Auto"},
            WORLD,
            need("Full", perDeviceBatchSize=1),
            "the job needs about 0.2 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 0.1, gathered "
            "layers 0.0, loss 0.0), but a rank has 0.1 GiB: what would fit: training.perDeviceBatchSize 1 with activationCheckpointing "
            "Full",
        ),
        (
            {"perDeviceBatchSize": 1, "method": {"type": "LoRA"}},
            WORLD,
            1.0,
            "the job needs about 0.3 GiB a rank (weights 0.0, gradients 0.0, optimizer 0.0, activations 0.3, gathered "
            "layers 0.0, loss 0.0), but a rank has 0.0 GiB: use a smaller model, or lower training.maxLength",
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
        "layers 2.9, loss 0.0), but a rank has 73.6 GiB: what would fit: 2 ranks with FSDP; training.optimizer.type AdamW8bit with "
        "weights BF16; method LoRA"
    )


def test_an_adapter_is_suggested_by_what_it_trains(shapes: dict[str, Shape]) -> None:
    full, lora = (
        estimate.estimate(
            shape, networks.recipe(BASE, precision="BF16"), shards=1, row_tokens=2048, recompute="Full"
        )
        for shape in (estimate._with_adapter(shapes["8B Full"]), shapes["8B LoRA"])
    )
    assert full.loss == lora.loss
    assert full.layer == pytest.approx(lora.layer, rel=0.05)


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
        "memory: about 55.7 GiB a rank (weights 15.0, gradients 1.2, optimizer 18.1, activations 18.6, gathered layers 0.8, "
        "loss 2.0) of 73.6 GiB; activation checkpointing Selective; logits of 261 tokens at a time\n"
    )


def test_replicas_are_told_of_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP holds everything on each rank; FSDP over the same ranks would fit."""
    many = World(0, 64, 0, 8, torch.device("cpu"))
    recipe = networks.recipe(BASE, strategy="DDP", perDeviceBatchSize=1, activationCheckpointing="Full")
    shape = Shape.of(Network(small(), Sft()), None, quantized=False)
    limit = estimate.estimate(shape, recipe, shards=64, row_tokens=2048, recompute="Full").total / 0.92 + 1
    with pytest.raises(RecipeRefusedError, match=r"what would fit: distributed\.strategy FSDP;"):
        chosen(monkeypatch, recipe, limit, many)


def test_ranks_of_a_pod_share_its_memory() -> None:
    alone, shared = (
        estimate.read_memory_limit(World(0, size, 0, size, torch.device("cpu"))) for size in (1, 4)
    )
    assert 0 < shared == alone / 4 < float("inf")
