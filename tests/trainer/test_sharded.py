"""Networks over several ranks, in BF16, and with compiled layers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from finetune_crds.training import Training
from finetune_trainer.train.data import pack
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.network import decoder_layers, trained
from finetune_trainer.train.model.optimizer import Optimizer
from finetune_trainer.train.objectives.answers import reference_of
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as found:
        yield found


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


def meshes(world: World, folder: Path) -> None:
    shapes = {kind: tuple(shard.mesh(kind, world).shape) for kind in ("FSDP", "HSDP", "DDP")}
    assert shapes == {"FSDP": (4,), "HSDP": (2, 2), "DDP": (4, 1)}
    # Ranks 0 and 1 are one pod, and shard between them.
    assert shard.mesh("HSDP", world).mesh.tolist() == [[0, 1], [2, 3]]


def test_ranks_are_replicas_times_shards(tmp_path: Path) -> None:
    networks.on_ranks(4, tmp_path / "rendezvous", meshes, tmp_path)


PAIRS = 4


def seen_reference(_network: Any, batch: pack.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the objective: the reference as the forward pass gets it."""
    assert batch.reference is not None
    return batch.reference, batch.reference.new_zeros(0)


def begins_at_its_reference(world: World, asked: tuple[Path, str, float]) -> None:
    base, objective, expected = asked
    recipe = networks.recipe(base, objective={"type": objective}, precision="BF16")
    network = networks.build(recipe, base, world)
    split = networks.random_split(documents=2, examples=PAIRS)
    rows = [[pair] for pair in range(world.rank, PAIRS, world.size)]
    batch = pack.collate(split, rows, pad_id=0)
    reference = torch.from_numpy(reference_of(network, [batch], world, PAIRS))[batch.examples]
    batch = replace(batch, reference=reference)
    with network.no_grad_forward(seen_reference):
        seen, _ = network(batch)
    torch.testing.assert_close(seen, reference, rtol=0, atol=0)
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
    for weight in trained(network):
        weight.grad = torch.ones_like(weight)
    assert optimizer.step(0).item()
    norm, before = optimizer.grad_norm(), [weight.full_tensor() for weight in local(network)]
    for weight in trained(network):
        weight.grad = torch.ones_like(weight)
    if world.rank == world.size - 1:
        first: Any = trained(network)[0].grad
        first.to_local().view(-1)[0] = math.nan
    assert not optimizer.step(1).item()
    after = [weight.full_tensor() for weight in local(network)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.grad_norm() == norm
    assert {int(state["step"]) for state in optimizer.adamw.state.values()} == {1}


def local(network: Any) -> list[Any]:
    return [weight.detach().clone() for weight in trained(network)]


def test_all_ranks_skip_a_step_in_which_one_has_broken_gradients(base_model: Path, tmp_path: Path) -> None:
    networks.on_ranks(2, tmp_path / "rendezvous", one_rank_has_no_number, base_model)


@dataclass(frozen=True)
class Bf16:
    """A pass in BF16, and how many ranks take part in it."""

    method: str
    objective: str
    ranks: int
    recompute: str = "None"


# Each method, each objective and each number of ranks meet at least once, as far as the recipe allows.
IN_BF16 = [
    Bf16("Full", "SFT", 2),
    Bf16("Full", "DPO", 1, "Full"),
    Bf16("Full", "Distillation", 1),
    Bf16("Full", "KTO", 2),
    Bf16("LoRA", "SFT", 1, "Selective"),
    Bf16("LoRA", "DPO", 2),
    Bf16("LoRA", "KTO", 1, "Full"),
    Bf16("LoRA", "Distillation", 2, "Full"),
    Bf16("DoRA", "SFT", 2, "Full"),
    Bf16("DoRA", "DPO", 1),
    Bf16("QLoRA", "SFT", 1),
    Bf16("QLoRA", "DPO", 2),
    Bf16("PromptTuning", "SFT", 1),
    Bf16("PromptTuning", "SFT", 2),
    Bf16("PrefixTuning", "SFT", 1),
    Bf16("PrefixTuning", "SFT", 2),
]


def mean_loss_and_norm(world: World, base: Path, case: Bf16, precision: str) -> list[float]:
    """The mean loss over 8 examples, and the norm of its gradient."""
    objective: dict[str, Any] = {"type": case.objective}
    if case.objective == "Distillation":
        objective["distillation"] = {"teacher": str(base)}
    recipe = networks.recipe(
        base,
        method={"type": case.method},
        objective=objective,
        precision=precision,
        packing="Tuning" not in case.method,
        activationCheckpointing=case.recompute,
    )
    torch.manual_seed(0)
    network = networks.build(recipe, base, world)
    split = networks.random_split(documents=2 if network.objective.has_reference else 1, examples=8)
    if network.objective.has_reference:
        split = replace(split, reference=of_equal_chances(split, network.vocabulary))
    batch = pack.collate(split, [[row] for row in range(world.rank, 8, world.size)], pad_id=0)
    loss, _ = network.train()(batch)
    loss.backward()
    summed, count = world.total(loss.item(), network.objective.count(batch))
    norm: Any = torch.nn.utils.get_total_norm([weight.grad for weight in trained(network)])
    return [summed / count, norm.full_tensor().item() / count]


def of_equal_chances(split: Split, vocabulary: int) -> np.ndarray:
    """The reference to which all tokens are equally likely."""
    targets = np.add.reduceat(split.loss_mask, split.offsets[:-1]) - split.loss_mask[split.offsets[:-1]]
    reference: np.ndarray = -math.log(vocabulary) * targets.reshape(-1, 2).astype(np.float32)
    return reference


def in_both_precisions(world: World, folders: tuple[Path, Path]) -> None:
    base, results = folders
    found = [
        {precision: mean_loss_and_norm(world, base, case, precision) for precision in ("BF16", "FP32")}
        for case in IN_BF16
        if case.ranks == world.size
    ]
    if world.leads:
        (results / "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_method_computes_in_bf16_what_it_does_in_fp32(
    base_model: Path, tmp_path: Path, ranks: int
) -> None:
    networks.on_ranks(ranks, tmp_path / "rendezvous", in_both_precisions, (base_model, tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    cases = [case for case in IN_BF16 if case.ranks == ranks]
    differing = {
        str(case): values
        for case, values in zip(cases, found, strict=True)
        if values["BF16"] != pytest.approx(values["FP32"], rel=0.02)
    }
    assert differing == {}
