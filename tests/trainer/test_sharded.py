"""Networks over several ranks, in half precision, and with compiled layers."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from finetune_crds.training import Training
from finetune_trainer.train.data import pack
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.network.trained_network import decoder_layers, trained_parameters
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.rows import local_rows
from finetune_trainer.train.objectives.answers import compute_reference
from support import networks
from support.half import WHOLE_TABLE, Half, differing
from support.pods import save_base_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


def learned(network: Any, batch: pack.Batch) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(4)
    loss, _ = network(batch)
    loss.backward()
    slopes = [weight.grad.full_tensor().clone() for weight in network.parameters()]
    network.zero_grad()
    return loss.item(), slopes


def two_batches() -> list[pack.Batch]:
    split = networks.random_split(examples=12)
    return [pack.collate(split, rows, pad_id=0, width=64, compiled=True) for rows in ([[0, 1]], [[2, 3]])]


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_compute_as_eager_ones(one_layer: Path, world: World) -> None:
    """Trap 15: each layer by itself and in place, so that names of weights stay, and rows of one length."""
    # Noise on the embeddings, which come before the layers.
    eager = networks.build(networks.recipe(one_layer, neftuneAlpha=5), one_layer, world)
    compiled = networks.build(networks.recipe(one_layer, neftuneAlpha=5, compile=True), one_layer, world)
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in eager.named_parameters()]
    for batch in two_batches():
        (loss, slopes), (expected, expected_slopes) = learned(compiled, batch), learned(eager, batch)
        assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(slopes, expected_slopes, rtol=1e-4, atol=1e-5)
    assert all(layer.forward is not type(layer).forward for layer in decoder_layers(compiled))


def meshes(world: World, folder: Path) -> None:
    shapes = {kind: tuple(shard.build_mesh(kind, world).shape) for kind in ("FSDP", "HSDP", "DDP")}
    assert shapes == {"FSDP": (4,), "HSDP": (2, 2), "DDP": (4, 1)}
    # Ranks 0 and 1 are one pod, and shard between them.
    assert shard.build_mesh("HSDP", world).mesh.tolist() == [[0, 1], [2, 3]]
    for strategy in ("HSDP", "DDP"):
        for group in shard.build_mesh(strategy, world, timeout_seconds=77).get_all_groups():
            assert group._get_backend(world.device).options._timeout == timedelta(seconds=77)


def test_ranks_are_replicas_times_shards(tmp_path: Path) -> None:
    networks.on_ranks(4, tmp_path / "rendezvous", meshes, tmp_path)


PAIRS = 4


def seen_reference(
    _network: Any, batch: pack.Batch, _hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the objective: the reference as the forward pass gets it."""
    assert batch.reference is not None
    return batch.reference, batch.reference.new_zeros(0)


def begins_at_its_reference(world: World, case: tuple[Path, str, float]) -> None:
    base, objective, expected = case
    recipe = networks.recipe(base, objective={"type": objective}, precision="BF16")
    network = networks.build(recipe, base, world)
    split = networks.random_split(documents=2, examples=PAIRS)
    rows = [[pair] for pair in range(world.rank, PAIRS, world.size)]
    batch = pack.collate(split, rows, pad_id=0)
    reference = torch.from_numpy(compute_reference(network, [batch], world, PAIRS))[batch.examples]
    batch = replace(batch, reference=reference)
    with network.no_grad_forward(seen_reference):
        first_loss, _ = network(batch)
    torch.testing.assert_close(first_loss, reference, rtol=0, atol=0)
    # The cast to bf16 and back would be seen.
    assert not torch.equal(reference, reference.bfloat16().float())
    loss, metrics = network.train()(batch)
    loss.backward()
    summed = torch.full((len(rows),), expected).sum()
    assert (loss.item(), metrics[0].item(), metrics[-1].item()) == (summed.item(), 0.0, 0.0)


@pytest.mark.parametrize(
    ("ranks", "objective", "expected"), [(1, "DPO", math.log(2)), (2, "DPO", math.log(2)), (2, "KTO", 0.5)]
)
def test_a_policy_in_bf16_begins_at_exactly_its_reference(
    base_model: Path, tmp_path: Path, ranks: int, objective: str, expected: float
) -> None:
    """The policy is its reference before the first step; FSDP2 must not round the reference with the inputs."""
    networks.on_ranks(
        ranks, tmp_path / "rendezvous", begins_at_its_reference, (base_model, objective, expected)
    )


def one_rank_has_no_number(world: World, base: Path) -> None:
    network = networks.build(networks.recipe(base), base, world)
    optimizer = Optimizer(network, Training(), 10)
    for weight in trained_parameters(network):
        weight.grad = torch.ones_like(weight)
    assert optimizer.step(0)[0].item()
    norm, before = optimizer.read_grad_norm(), [weight.full_tensor() for weight in local(network)]
    for weight in trained_parameters(network):
        weight.grad = torch.ones_like(weight)
    if world.rank == world.size - 1:
        first: Any = trained_parameters(network)[0].grad
        first.to_local().view(-1)[0] = math.nan
    assert not optimizer.step(1)[0].item()
    after = [weight.full_tensor() for weight in local(network)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.read_grad_norm() == norm
    assert {int(state["step"]) for state in optimizer.parts[0].state.values()} == {1}


def local(network: Any) -> list[Any]:
    return [weight.detach().clone() for weight in trained_parameters(network)]


def test_all_ranks_skip_a_step_in_which_one_has_broken_gradients(base_model: Path, tmp_path: Path) -> None:
    networks.on_ranks(2, tmp_path / "rendezvous", one_rank_has_no_number, base_model)


# In BF16: each method with each objective that it can have, and with each number of ranks; the long tests run all three together. FP16 has
# more bits.
IN_HALF = [
    Half("Full", "SFT", 2),
    Half("Full", "DPO", 1, "Full"),
    Half("Full", "Distillation", 1),
    Half("Full", "KTO", 2),
    Half("Full", "SimPO", 2),
    Half("Full", "ORPO", 1, "Selective"),
    Half("Full", "IPO", 1),
    Half("LoRA", "SFT", 1, "Selective"),
    Half("LoRA", "DPO", 2),
    Half("LoRA", "KTO", 1, "Full"),
    Half("LoRA", "Distillation", 2, "Full", ("embed_tokens", "input_layernorm")),
    Half("DoRA", "SFT", 2, "Full"),
    Half("DoRA", "DPO", 1),
    Half("LoRA", "ORPO", 2),
    Half("DoRA", "ORPO", 2, "Full"),
    Half("DoRA", "KTO", 1),
    Half("DoRA", "SimPO", 2),
    Half("DoRA", "Distillation", 1),
    Half("QLoRA", "SFT", 1),
    Half("QLoRA", "DPO", 2, whole=("lm_head",)),
    Half("QLoRA", "ORPO", 1),
    Half("QLoRA", "KTO", 2),
    Half("QLoRA", "SimPO", 1),
    Half("LoRA", "IPO", 2),
    Half("LoRA", "SimPO", 1),
    Half("Full", "RewardModel", 2),
    Half("LoRA", "RewardModel", 1),
    Half("DoRA", "RewardModel", 2),
    Half("QLoRA", "RewardModel", 1),
    Half("PromptTuning", "SFT", 1),
    Half("PromptTuning", "SFT", 2),
    Half("PrefixTuning", "SFT", 1),
    Half("PrefixTuning", "SFT", 2),
    Half("Full", "SFT", 2, "Selective", precision="FP16"),
    Half("LoRA", "Distillation", 1, precision="FP16"),
    Half("DoRA", "KTO", 2, precision="FP16"),
    Half("QLoRA", "DPO", 1, "Full", precision="FP16"),
    Half("LoRA", "RewardModel", 2, precision="FP16"),
    Half("PrefixTuning", "SFT", 1, precision="FP16"),
    Half("PromptTuning", "SFT", 2, precision="FP16"),
]


def pairs_of(cases: list[Half]) -> set[tuple[object, object]]:
    """What meets what in some cases, of methods, objectives and numbers of ranks."""
    each = [(case.method, case.objective, case.ranks) for case in cases]
    return {pair for parts in each for pair in combinations(parts, 2)}


def test_each_method_each_objective_and_each_number_of_ranks_meet_in_bf16() -> None:
    assert pairs_of(WHOLE_TABLE) <= pairs_of([case for case in IN_HALF if case.precision == "BF16"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_method_computes_in_half_precision_what_it_does_in_fp32(tmp_path: Path, ranks: int) -> None:
    assert differing(IN_HALF, ranks, tmp_path) == {}


# Which optimizer, and over what the ranks share the weights.
OPTIMIZERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "AdamW8bit"}, "FSDP"),
    ({"type": "AdamW8bit"}, "HSDP"),
    ({"type": "Muon"}, "FSDP"),
    ({"type": "Muon"}, "HSDP"),
    ({"type": "Muon"}, "DDP"),
]


def give_gradients(network: Any, step: int) -> None:
    """Random ones, of which each rank has its rows."""
    torch.manual_seed(step)
    for weight in trained_parameters(network):
        full_gradient = torch.randn(weight.shape)
        _, rows = local_rows(weight)
        if isinstance(weight, DTensor):
            gradient = torch.empty_like(weight)
            local_rows(gradient)[0].copy_(full_gradient[rows])
            weight.grad = gradient
        else:
            weight.grad = full_gradient


def two_steps(network: Any, recipe: Any) -> dict[str, torch.Tensor]:
    """The whole weights after two steps."""
    optimizer = Optimizer(network, recipe.training, 10)
    for step in range(2):
        give_gradients(network, step)
        assert optimizer.step(step)[0].item()
    return {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight.detach()
        for name, weight in network.named_parameters()
    }


def steps_as_unsharded(world: World, base: Path) -> None:
    from transformers import AutoModelForCausalLM

    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.objectives.sft import Sft

    def recipe(spec: dict[str, Any], strategy: str, precision: str) -> Any:
        # Gradients are below this norm, which ranks sum up in another order.
        return networks.recipe(
            base, strategy=strategy, precision=precision, optimizer=spec, weightDecay=0.1, maxGradNorm=1e9
        )

    for spec, strategy in OPTIMIZERS:
        chosen = recipe(spec, strategy, "FP32")
        sharded_steps = two_steps(networks.build(chosen, base, world), chosen)
        plain = Network(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), Sft())
        torch.testing.assert_close(
            sharded_steps, two_steps(plain, chosen), rtol=0, atol=0, msg=f"{spec} {strategy}"
        )
    for strategy in ("HSDP", "DDP"):
        rounds = recipe({"type": "AdamW8bit", "weights": "BF16"}, strategy, "BF16")
        weights = two_steps(networks.build(rounds, base, world), rounds)
        # Replicas that rounded each in its own way would drift apart.
        sums = torch.stack([weight.double().sum() for weight in weights.values()])
        everywhere = [torch.empty_like(sums) for _ in range(world.size)]
        torch.distributed.all_gather(everywhere, sums)
        assert all(torch.equal(each, sums) for each in everywhere)


def test_sharded_optimizers_take_the_steps_of_unsharded_ones(tmp_path: Path) -> None:
    """Bit for bit; some matrices have rows that four ranks cannot share out evenly."""
    save_base_model(tmp_path / "base", width=64)
    networks.on_ranks(4, tmp_path / "rendezvous", steps_as_unsharded, tmp_path / "base")
