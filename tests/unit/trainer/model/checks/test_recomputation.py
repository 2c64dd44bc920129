"""Activation checkpointing changes no gradient; where it would, another kind is chosen, or the job is refused."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.checks import probe, recomputation
from finetune_trainer.train.model.checks.recomputation import Verdict
from finetune_trainer.train.model.memory import fit
from finetune_trainer.train.model.network.trained_network import Network, decoder_layers
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor"),
]

BASE = Path("/base")
KEY = "what the result depends on"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Model types, and the fields of their configs.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": EXPERTS,
    # Adds biases to the products of its experts in place.
    "gpt_oss": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    # Adds to the outputs of products in place, after it has reshaped them.
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    # Only its second layer has experts.
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
}


def make_network(kind: str) -> Network:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {} if kind == "gpt2" else SMALL
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **MODELS[kind]))
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05, generator=draw)
    return Network(model.train(), Sft())


def few_tokens() -> pack.Batch:
    return pack.collate(networks.of_documents([*range(5, 17)]), [[0]], pad_id=0)


def compute_gradients(network: Network) -> dict[str, torch.Tensor]:
    network.zero_grad(set_to_none=True)
    # GPT-2 has dropout.
    torch.manual_seed(1)
    network.train()(few_tokens())[0].backward()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


@pytest.mark.parametrize("kind", MODELS)
def test_recomputation_changes_no_gradient(kind: str, world: World) -> None:
    network = make_network(kind)
    plain = compute_gradients(network)
    for recompute in ("Selective", "Full"):
        recomputation.enable(network.model, recompute)
        torch.testing.assert_close(compute_gradients(network), plain, rtol=0, atol=0)
        verdict = recomputation.verify(network, recompute, networks.recipe(BASE), world, KEY)
        assert verdict == Verdict(recompute, recompute, KEY)


# Each operation whose output is saved, and why. Nothing that a model changes in place is among them: `add` and other operations on
# single values, which hidden states go through; and `bmm`.
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "attention on GPUs",
    "aten::_scaled_dot_product_efficient_attention": "attention on GPUs",
    "aten::_scaled_dot_product_cudnn_attention": "attention on GPUs",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention on CPUs",
    "torch_attn::_varlen_attn": "attention of packed documents",
}
PRODUCTS = {
    "aten::mm": "Linear without a bias",
    "aten::addmm": "Linear and Conv1D with a bias",
    "bitsandbytes::gemm_4bit": "Linear in four bits",
}
GROUPED_PRODUCT = {"aten::_grouped_mm": "experts without biases, which transformers would add in place"}


@pytest.mark.parametrize(
    ("kind", "products"),
    [("llama", PRODUCTS | GROUPED_PRODUCT), ("gpt_oss", PRODUCTS)],
    ids=["plain", "biases"],
)
def test_selective_saves_attention_and_products_alone(kind: str, products: dict[str, str]) -> None:
    # They register operations of their own.
    for name in ("bitsandbytes", "torch.nn.attention.varlen"):
        importlib.import_module(name)
    saved = recomputation._find_saved_operations(make_network(kind).model)
    assert [{operation.name() for operation in operations} for operations in saved] == [
        {*ATTENTION},
        {*products},
    ]


def save_products(*names: str) -> Callable[[object], tuple[set[Any], set[Any]]]:
    """What is saved of a model that changes the outputs of these products in place."""
    return lambda _model: (recomputation._get_operations("aten", *names), set())


# Model type, the operations whose outputs are saved, and what the log says of their gradients.
UNSAFE = {
    "a reshaped output that changes": (
        "gemma3n_text",
        ("bmm",),
        "the gradient of the input in layer 0 differs by ",
    ),
    "an output that changes": (
        "gpt_oss",
        ("_grouped_mm",),
        "layer 0 fails with Tensor cached during selective activation checkpoint has been mutated",
    ),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_full_replaces_what_changes_gradients(
    case: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, saved, sentence = UNSAFE[case]
    monkeypatch.setattr(recomputation, "_find_saved_operations", save_products(*saved))
    network = make_network(kind)
    recomputation.enable(network.model, "Selective")
    verdict = recomputation.verify(network, "Selective", networks.recipe(BASE), world, KEY)
    assert verdict == Verdict("Selective", "Full", KEY)
    start = "activation checkpointing Selective would change the gradients of /base: "
    assert capsys.readouterr().out.startswith(f"{start}{sentence}")


def change_input(network: Network) -> None:
    """Add to the hidden states in place, which the recomputation does again."""
    norm = decoder_layers(network)[0].get_submodule("input_layernorm")
    norm.register_forward_pre_hook(lambda _module, args: (args[0].add_(1.0),))


def change_behaviour(network: Network) -> None:
    """Compute something else in the fifth call, which is the recomputation.

    The others are without gradients, twice without recomputation, and with it.
    """
    calls = iter(range(10))
    norm = decoder_layers(network)[0].get_submodule("input_layernorm")
    norm.register_forward_hook(lambda _module, _args, output: output * (2 if next(calls) == 4 else 1))


# What a layer does, and how its gradients change.
UNSOUND: dict[str, tuple[Callable[[Network], None], str]] = {
    "its input changes": (
        change_input,
        "layer 0 fails with one of the variables needed for gradient computation has ",
    ),
    "it behaves otherwise": (change_behaviour, "the gradient of the input in layer 0 differs by "),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_a_model_whose_gradients_full_recomputation_changes_is_refused(case: str, world: World) -> None:
    change, difference = UNSOUND[case]
    network = make_network("llama")
    change(network)
    with pytest.raises(RecipeRefusedError) as refused:
        recomputation.verify(network, "Full", networks.recipe(BASE), world, KEY)
    assert refused.value.reason == "RecomputationUnsupported"
    begin = "/base is a llama, whose gradients change when its layers are recomputed ("
    assert refused.value.message.startswith(f"{begin}{difference}")
    assert refused.value.message.endswith("): set training.activationCheckpointing to None")


# Gradients of two equal runs and of recomputation, and the difference that is reported.
DIFFERENCES: dict[str, tuple[list[float], list[float], list[float], str | None]] = {
    "the same": ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], None),
    "rounding": ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0 + 2e-7], None),
    "no more than noise": ([1.0, 2.0], [1.0, 2.1], [1.0, 1.5], None),
    "more than noise": ([3.0, 4.0], [3.0, 4.01], [3.0, 3.0], "the gradient of w in layer 0 differs by 20.0%"),
    "not a number": (
        [1.0, 2.0],
        [1.0, 2.0],
        [1.0, float("nan")],
        "the gradient of w in layer 0 differs by nan%",
    ),
    "an overflow without recomputation": (
        [1.0, float("inf")],
        [1.0, float("inf")],
        [1.0, float("inf")],
        None,
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_noise_is_tolerated(case: str) -> None:
    *runs, expected = DIFFERENCES[case]
    plain, again, recomputed = ({"w": torch.tensor(values)} for values in runs)
    noise = recomputation._measure_distances(plain, again)
    assert recomputation._describe_difference("layer 0", plain, noise, recomputed) == expected


def test_no_more_than_two_sets_of_gradients_exist_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of whole layers, which each rank has, and stay on the device."""
    compute = recomputation._compute_gradients
    sets: list[list[weakref.ref[torch.Tensor]]] = []
    alive: list[int] = []

    def count(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        alive.append(sum(any(gradient() is not None for gradient in each) for each in sets))
        gradients = compute(*args, **options)
        sets.append([weakref.ref(gradient) for gradient in gradients.values()])
        return gradients

    monkeypatch.setattr(recomputation, "_compute_gradients", count)
    copy_to_host = torch.Tensor.cpu

    def copy_state(values: torch.Tensor) -> torch.Tensor:
        """That of random numbers may be copied."""
        assert not values.is_floating_point()
        return copy_to_host(values)

    monkeypatch.setattr(torch.Tensor, "cpu", copy_state)
    # Its two layers differ.
    network = make_network("qwen3_moe")
    recomputation.verify(network, "Full", networks.recipe(BASE), world, KEY)
    assert alive == [0, 1, 1] * 2


@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (3, 7, 5)])
def test_distances_do_not_depend_on_the_size_of_the_pieces(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "_MAX_NUMBERS_PER_PIECE", 10)
    first, second = torch.randn(shape), torch.randn(shape)
    assert recomputation._norm(first) == pytest.approx(float(first.norm()))
    assert recomputation._distance(first, second) == pytest.approx(float((first - second).norm()))


def make_jetmoe() -> Network:
    from transformers import JetMoeConfig, JetMoeForCausalLM

    with torch.device("meta"):
        model = JetMoeForCausalLM(JetMoeConfig(**SMALL, **EXPERTS, kv_channels=8))
    return Network(model, Sft())


@pytest.mark.parametrize("recompute", ["Selective", "Full"])
def test_a_model_that_cannot_recompute_is_refused(recompute: str) -> None:
    recipe = networks.recipe(BASE, activationCheckpointing=recompute)
    with pytest.raises(RecipeRefusedError) as refused:
        recomputation.check_supported(make_jetmoe().model, recipe)
    assert (refused.value.reason, refused.value.message) == (
        "RecomputationUnsupported",
        f"training.activationCheckpointing {recompute} is not supported by /base, because transformers cannot recompute the layers of a "
        "jetmoe: set training.activationCheckpointing to None",
    )


def test_auto_does_not_choose_what_a_model_cannot_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = networks.recipe(BASE, activationCheckpointing="Auto", perDeviceBatchSize=2)
    network = make_jetmoe()
    recomputation.check_supported(network.model, recipe)
    monkeypatch.setattr(fit, "read_memory_limit", lambda _world: 1.0)
    with pytest.raises(RecipeRefusedError) as refused:
        fit.choose(network, recipe, world, 64, None)
    assert "activationCheckpointing" not in refused.value.message
    assert fit.decide(network, recipe, world, 64, None).kind == "None"


def test_a_restart_uses_the_verdict_of_its_checkpoint(
    one_layer: Path, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the attempt checks something else."""
    from finetune_trainer.examples.tokenizer import load_tokenizer

    recipe = networks.recipe(one_layer, activationCheckpointing="Selective")
    tokenizer = load_tokenizer(recipe.model, one_layer)
    key = probe.compute_key(recipe, world)
    verify = recomputation.verify
    verified: list[Any] = []
    plans: list[str] = []

    def count(*arguments: Any) -> Verdict:
        verified.append(arguments)
        return verify(*arguments)

    monkeypatch.setattr(recomputation, "verify", count)

    def kept(verdict: Verdict | None) -> dict[str, Any]:
        """What the next checkpoint has, and whether it was computed, and what was planned."""
        verified.clear()
        plans.clear()
        verdicts: list[Verdict] = []
        build.build_network(
            recipe,
            one_layer,
            tokenizer,
            world,
            one_layer / "teacher",
            on_plan=lambda plan: plans.append(plan.activation_checkpointing),
            check_key=key,
            verdict=verdict,
            on_verdict=verdicts.append,
        )
        return {**asdict(verdicts[0]), "verified": len(verified), "plans": list(plans)}

    fresh = {"requested": "Selective", "kind": "Selective", "key": key, "verified": 1, "plans": ["Selective"]}
    assert kept(None) == fresh
    assert kept(Verdict.of({"requested": "Selective", "kind": "Selective", "key": key})) == {
        **fresh,
        "verified": 0,
    }
    assert kept(Verdict.of({"requested": "Selective", "kind": "Selective", "key": "another image"})) == fresh
    assert kept(Verdict.of({"requested": "Full", "kind": "Full", "key": key})) == fresh
    assert kept(Verdict.of({"of": "a later release"})) == fresh
    capsys.readouterr()
    assert kept(Verdict("Selective", "Full", key)) == {
        **fresh, "kind": "Full", "verified": 0, "plans": ["Selective", "Full"]
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines()[-1] == (
        "activation checkpointing Selective would change the gradients of this model: using Full"
    )
