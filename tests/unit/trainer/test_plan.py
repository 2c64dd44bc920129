"""One step of a recipe on fake tensors: its memory, its collectives, and what it waits for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.nn import functional

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train import build, plan
from finetune_trainer.train.__main__ import main
from finetune_trainer.train.loop import take_step
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.memory import accounting
from finetune_trainer.train.model.network.trained_network import Network, Objective
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.weights import fill, load
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.device import Card
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_trainer.train.data.pack import Batch

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

H100 = Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0))
LAYERS, WIDTH, VOCABULARY = 3, 512, 16000


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with the config of a Llama, and nothing else."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    model_type = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**model_type, **sizes}), encoding="utf-8")
    return tmp_path


def recipe(config: Path, *, nodes: int = 1, gpus: int = 1, **changes: Any) -> Recipe:
    tiny_recipe = networks.recipe(
        config, **{"precision": "BF16", "perDeviceBatchSize": 2, "maxLength": 1024, **changes}
    )
    return tiny_recipe.model_copy(
        update={
            "distributed": tiny_recipe.distributed.model_copy(update={"nodes": nodes, "gpus_per_node": gpus})
        }
    )


def test_a_step_sends_what_fsdp_sends(config: Path) -> None:
    """Layers are gathered for each pass, both ends and the last norm once; gradients are reduced once, in fp32."""
    planned = plan.plan_step(recipe(config, nodes=2, gpus=2, maxLength=64), config, H100)
    a_layer = 4 * WIDTH**2 + 9 * WIDTH**2 + 2 * WIDTH
    root_parameters = 2 * VOCABULARY * WIDTH + WIDTH
    assert planned.step.traffic == {
        "all-gather": accounting.Traffic(2 * LAYERS + 3, 2 * (2 * LAYERS * a_layer + root_parameters)),
        # The norm of each weight's gradient.
        "all-reduce": accounting.Traffic(1, 4 * (9 * LAYERS + 3)),
        "reduce-scatter": accounting.Traffic(LAYERS + 3, 4 * (LAYERS * a_layer + root_parameters)),
    }
    assert planned.step.waits == []
    weights = LAYERS * a_layer + root_parameters
    # Less than all gradients: DTensor finds shapes on tensors of whole size.
    assert planned.step.peak["working"] < 4 * weights
    # The output layer and the last norm, in the loss, when most is in use: no buffer of their gather is left.
    assert planned.step.peak["gathered"] == pytest.approx(2 * (VOCABULARY * WIDTH + WIDTH), rel=0.001)
    # Besides buffers, and the optimizer's counts of steps, a block each.
    assert planned.step.peak["parameters"] == pytest.approx(4 * weights / 4, rel=0.001)
    assert planned.step.peak["optimizer"] == pytest.approx(8 * weights / 4, rel=0.001)


def test_an_output_layer_that_a_loss_applies_twice_is_gathered_once_a_pass(config: Path) -> None:
    """The log-probabilities of answers come first, and their gradient with them."""
    dpo_recipe = recipe(
        config, gpus=2, objective={"type": "DPO"}, maxLength=64, gradientAccumulation=3, perDeviceBatchSize=1
    )
    counts = {
        name: each.count for name, each in plan.plan_step(dpo_recipe, config, H100).step.traffic.items()
    }
    assert counts == {"all-gather": 3 * (2 * LAYERS + 3), "all-reduce": 1, "reduce-scatter": 3 * (LAYERS + 3)}


ACCUMULATES = {"perDeviceBatchSize": 1, "maxLength": 512, "gradientAccumulation": 2}
# Method, recomputation, GPUs, and what else the training is told.
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("Full", "None", 4, {}),
    ("Full", "Full", 1, {}),
    ("LoRA", "Selective", 1, {}),
    ("QLoRA", "Full", 2, {}),
    ("QLoRA", "Selective", 2, {}),
    ("Full", "Full", 2, {"optimizer": {"type": "AdamW8bit"}}),
    # Gradients of earlier passes are a fifth, and are summed up in fp32 between replicas.
    ("Full", "Selective", 1, ACCUMULATES),
    ("Full", "None", 2, {**ACCUMULATES, "optimizer": {"weights": "BF16"}, "strategy": "DDP"}),
    # No output layer, and no logits: with two documents of each example, half as many examples.
    ("Full", "Full", 2, {"objective": {"type": "RewardModel"}, "perDeviceBatchSize": 1}),
    ("LoRA", "Selective", 1, {"objective": {"type": "RewardModel"}, "perDeviceBatchSize": 1}),
]


@pytest.mark.parametrize(("method", "recompute", "gpus", "changes"), CASES)
def test_the_estimate_is_about_what_is_planned(
    config: Path, method: str, recompute: str, gpus: int, changes: dict[str, Any]
) -> None:
    case_recipe = recipe(
        config, gpus=gpus, method={"type": method}, activationCheckpointing=recompute, **changes
    )
    planned = plan.plan_step(case_recipe, config, H100)
    assert planned.choice.estimate.total == pytest.approx(planned.step.total, rel=0.15)


@pytest.mark.parametrize(("method", "recompute"), [("Full", "None"), ("LoRA", "None"), ("LoRA", "Selective")])
def test_the_estimate_knows_the_experts_of_a_token(config: Path, method: str, recompute: str) -> None:
    mixture = {
        **json.loads((config / "config.json").read_text("utf-8")),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 8,
        "intermediate_size": 2 * WIDTH,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    (config / "config.json").write_text(json.dumps(mixture), encoding="utf-8")
    planned = plan.plan_step(
        recipe(config, method={"type": method}, activationCheckpointing=recompute), config, H100
    )
    assert planned.choice.estimate.total == pytest.approx(planned.step.total, rel=0.07)
    assert planned.choice.estimate.activations == pytest.approx(planned.step.peak["activations"], rel=0.05)


def test_a_plan_has_what_layers_of_pissa_began_as(config: Path) -> None:
    """In fp32, shared out as the layers are: beside frozen weights in bf16, and adapters of rank 16 in fp32."""
    method = {"type": "LoRA", "lora": {"init": "PiSSA"}}
    planned = plan.plan_step(recipe(config, gpus=2, maxLength=64, method=method), config, H100)
    frozen = LAYERS * (13 * WIDTH**2 + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
    numbers = 16 * LAYERS * (4 * 2 * WIDTH + 3 * 4 * WIDTH)
    assert planned.choice.shape.initial == numbers
    assert planned.step.peak["parameters"] == pytest.approx((2 * frozen + 8 * numbers) / 2, rel=0.001)


class Plain(Objective):
    """Cross-entropy with all logits at once: torch's tracker refuses gradients that are taken in the forward pass."""

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = batch.at_targets(batch.targets)
        loss = functional.cross_entropy(network.head.compute_logits(hidden), targets, reduction="sum")
        return loss, loss.new_zeros(0)


@pytest.mark.parametrize("recompute", ["None", "Full"])
def test_a_plan_is_what_torch_tracks_in_a_real_step(
    config: Path, recompute: Recomputation, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_recipe = recipe(
        config, precision="FP32", perDeviceBatchSize=1, maxLength=128, activationCheckpointing=recompute
    )
    monkeypatch.setattr(build, "build_objective", lambda *_: Plain())
    planned = plan.plan_step(step_recipe, config, H100).step.total
    with networks.alone() as world:
        network = Network(
            adapt.adapt(load.build_skeleton(step_recipe, config, world), step_recipe.method, "base"), Plain()
        )
        build.recompute_and_shard(network, step_recipe, recompute, shard.build_mesh("FSDP", world))
        fill.materialize(network, world.device)
        for weight in network.parameters():
            assert isinstance(weight, DTensor)
            torch.nn.init.normal_(weight.to_local(), std=0.02)
        optimizer = Optimizer(network, step_recipe.training, 2)
        tracker = FSDPMemTracker(network, optimizer.parts[0])
        tracker.track_external(network)
        with tracker:
            # From the second step on there are the optimizer's moments.
            for step in range(2):
                take_step(
                    network,
                    optimizer,
                    plan.make_full_batches(step_recipe),
                    step=step,
                    count=1.0,
                    add_batch=lambda *_: None,
                )
                tracker.reset_mod_stats()
        tracked = tracker.get_tracker_snapshot("peak")[world.device]["Total"]
    assert planned == pytest.approx(tracked, rel=0.1)


class Waiting(Sft):
    """Reads its loss."""

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = super().__call__(network, batch, hidden)
        return loss * loss.item(), metrics


def test_a_reward_model_in_four_bits_is_not_planned(config: Path) -> None:
    qlora = recipe(config, objective={"type": "RewardModel"}, method={"type": "QLoRA"})
    with pytest.raises(
        RecipeRefusedError, match="--plan does not support objective RewardModel with method QLoRA"
    ):
        plan.plan_step(qlora, config, H100)


def test_a_step_that_waits_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_objective", lambda *_: Waiting())
    with pytest.raises(RecipeRefusedError) as refused:
        plan.plan_step(recipe(config), config, H100)
    assert refused.value.message == (
        f"a step of {config} needs a value from the GPU (aten._local_scalar_dense.default), so it cannot be planned"
    )


def test_a_waiting_operation_is_counted() -> None:
    with accounting.Accounting(torch.device("cpu")) as account:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
        sizes = torch.arange(3)
        torch.repeat_interleave(sizes, sizes)
        torch.repeat_interleave(sizes, sizes, output_size=3)
    assert account.waits == [
        "aten._local_scalar_dense.default",
        "aten.nonzero.default",
        "aten.repeat_interleave.Tensor",
    ]


def test_memory_is_counted_when_most_is_used() -> None:
    with accounting.Accounting(torch.device("cpu")) as account:
        kept_tensor = torch.zeros(1024)
        account.set_kind("parameters", [kept_tensor])
        freed_tensor = torch.zeros(2048)
        account.set_default_kind("activations")
        del freed_tensor
        emptied = torch.zeros(256)
        emptied.untyped_storage().resize_(0)
        last = torch.zeros(2560)
        account.set_default_kind("gathered")
    del last
    expected = dict.fromkeys(accounting.KINDS, 0) | {"parameters": 4096, "gathered": 10240}
    assert account.compute_peak() == expected


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], (16777, "73.6 GiB: fits")),
        (["--gpu-memory", "0.1"], (2097, "0.1 GiB: does not fit")),
    ],
)
def test_the_command_prints_a_plan(
    config: Path,
    arguments: list[str],
    output: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = config / "recipe.yaml"
    path.write_text(recipe(config, gpus=2, activationCheckpointing="Full").to_yaml(), encoding="utf-8")
    monkeypatch.setenv("FINETUNE_RECIPE", str(path))
    assert main(["--plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    chunk, fits = output
    assert lines[0] == f"2 ranks, activation checkpointing Full, logits of {chunk} tokens at a time"
    assert lines[1].startswith("peak memory of a rank: ")
    assert lines[3] == f"memory of a rank: {fits}"
    assert lines[4].startswith(f"all-gather: {2 * LAYERS + 3} a step, ")


def test_a_recipe_that_the_api_server_would_refuse_is_not_planned(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config / "recipe.yaml"
    path.write_text(recipe(config, earlyStopping={}).to_yaml(), encoding="utf-8")
    monkeypatch.setenv("FINETUNE_RECIPE", str(path))
    assert main(["--plan"]) == 64
    assert (
        "training.evalEverySteps: earlyStopping and select Best require evaluations during training"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("method", ["Full", "DoRA", "QLoRA"])
def test_new_tokens_have_rows_in_a_plan(config: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both ends: all of them, or those that are trained and the frozen ones under them."""
    plain_recipe = recipe(config, gpus=2, method={"type": method}, maxLength=64)
    added = plain_recipe.model.model_copy(update={"new_tokens": ["<tool>", "</tool>"]})
    after = plan.plan_step(plain_recipe.model_copy(update={"model": added}), config, H100).choice.shape
    # The step without new tokens is that of other tests.
    monkeypatch.setattr(plan, "measure_step", lambda *_: None)
    before = plan.plan_step(plain_recipe, config, H100).choice.shape
    rows = 2 * 2 * WIDTH
    grown = (after.parameters - before.parameters, after.trained - before.trained)
    assert grown == ((rows, rows) if method == "Full" else (2 * rows, rows))


GPUS: dict[str, tuple[dict[str, str], float]] = {
    "whole": ({"product": "NVIDIA-A100-SXM4-80GB"}, 80),
    "a slice as a product": ({"product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, 10),
    "a slice as a resource": (
        {"product": "NVIDIA-A100-SXM4-80GB", "resourceName": "nvidia.com/mig-3g.40gb"},
        40,
    ),
}


@pytest.mark.parametrize(("gpu", "size"), GPUS.values(), ids=GPUS)
def test_a_gpu_has_the_memory_that_its_name_says(config: Path, gpu: dict[str, str], size: float) -> None:
    plain_recipe = recipe(config)
    distributed = plain_recipe.distributed.model_validate({"gpusPerNode": 1, "gpu": gpu})
    assert (
        plan._choose_card(plain_recipe.model_copy(update={"distributed": distributed}), None).memory
        == size * 2**30
    )


OLD_GPUS = {"Tesla-T4": (7, 5), "Tesla-V100-SXM2-32GB": (7, 0), "NVIDIA-A100-SXM4-40GB": (9, 0)}


@pytest.mark.parametrize(("product", "capability"), OLD_GPUS.items(), ids=OLD_GPUS)
def test_an_old_gpu_is_known_by_its_name(config: Path, product: str, capability: tuple[int, int]) -> None:
    plain_recipe = recipe(config, gpus=1)
    distributed = plain_recipe.distributed.model_validate({"gpusPerNode": 1, "gpu": {"product": product}})
    card = plan._choose_card(plain_recipe.model_copy(update={"distributed": distributed}), 16.0)
    assert card.capability == capability


def test_bf16_is_refused_on_an_old_gpu_before_a_model_is_read(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_recipe = recipe(config, gpus=1)
    distributed = plain_recipe.distributed.model_validate({"gpusPerNode": 1, "gpu": {"product": "Tesla-T4"}})
    old = plain_recipe.model_copy(update={"distributed": distributed})
    monkeypatch.setattr(plan, "load_recipe", lambda: old)
    with pytest.raises(RecipeRefusedError, match=r"^training\.precision BF16, the default, requires a GPU"):
        plan.print_plan(config=None, gpu_memory=16.0)


def test_a_gpu_of_unknown_memory_is_asked_for(config: Path) -> None:
    plain_recipe = recipe(config, gpus=1)
    with_product = plain_recipe.distributed.model_validate(
        {"gpusPerNode": 1, "gpu": {"product": "NVIDIA-H200"}}
    )
    with pytest.raises(RecipeRefusedError, match=r"add --gpu-memory GIB$"):
        plan._choose_card(plain_recipe.model_copy(update={"distributed": with_product}), None)
