"""The memory of a job is estimated before loading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from finetune_crds.checkpoint import Checkpoint
from finetune_trainer.train import build
from finetune_trainer.train.checkpoint import shards
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.adapters import adapt, pissa
from finetune_trainer.train.model.checks import recomputation
from finetune_trainer.train.model.memory import accounting, estimate, fit
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.lm_head import Head
from finetune_trainer.train.model.network.trained_network import Network, trained_parameters
from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
from finetune_trainer.train.objectives.sft import Sft
from support import networks
from support.pods import save_base_model
from support.shapes import ADAPTER_8B, ENDS_8B, PARAMETERS, llama_shapes

if TYPE_CHECKING:
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
    return llama_shapes()


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
        (
            memory.weights,
            memory.gradients,
            memory.optimizer,
            memory.activations,
            memory.gathered,
            memory.logits,
        )
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


def test_on_one_shard_only_trained_weights_are_gathered(shapes: dict[str, Shape]) -> None:
    recipe = networks.recipe(BASE, method={"type": "LoRA"}, precision="BF16")
    memory = estimate.estimate(shapes["8B LoRA"], recipe, shards=1, row_tokens=2048, recompute="Full")
    # The adapters of a layer and of the next one, in bf16.
    assert memory.gathered == 2 * 2 * ADAPTER_8B / 32


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
@pytest.mark.parametrize("recompute", fit.KINDS)
def test_activations_are_estimated_within_a_factor_of_two(
    method: str, recompute: Recomputation, precision: str
) -> None:
    recipe = networks.recipe(BASE, method={"type": method}, precision=precision, perDeviceBatchSize=2)
    model = networks.small_llama().to(torch.bfloat16 if precision == "BF16" else torch.float32).train()
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
