"""Ranks agree on the activation checkpointing of a model that changes what is saved of it, and train with the right gradients."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.memory import fit
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.model.checks.recomputation import Verdict
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

RANKS = 2
# Method, and what the recipe asks for.
METHODS = ("Full", "LoRA", "QLoRA")
CASES = [(method, kind) for method in METHODS for kind in ("None", "Selective")]


def one_rank(world: World, base: Path) -> None:
    """Save the gradients of each case, and the activation checkpointing that was used."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def changing(self: Any, states: torch.Tensor) -> torch.Tensor:
        # NB: torch does not notice the change of a product that was reshaped; the sine needs its input for the gradient.
        return forward(self, states).add_(1.0).sin()

    LlamaMLP.forward = changing
    results = []
    for method, kind in CASES:
        recipe = networks.recipe(base, method={"type": method}, activationCheckpointing=kind)
        verdicts: list[Verdict] = []
        tokenizer = load_tokenizer(recipe.model, base)
        network = build.build_network(
            recipe, base, tokenizer, world, base / "teacher", on_verdict=verdicts.append
        )
        batch = pack.collate(networks.of_documents([*range(5, 17)]), [[0]], pad_id=0)
        network.train()(batch)[0].backward()
        gradients = {
            name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None
        }
        gathered = {
            name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for name, gradient in gradients.items()
        }
        results.append(([verdict.kind for verdict in verdicts], gathered))
    torch.save(results, base / f"gradients-{world.rank}.pt")


def rank_on_its_own_gpu(world: World, base: Path) -> None:
    """Save what is planned and verified where rank 0 has more memory than the others need to recompute nothing."""
    decide = fit.decide

    def decide_for_own_gpu(network: Network, recipe: Recipe, world: World, *rest: Any) -> fit.Choice:
        choice = decide(network, recipe, world, *rest)
        if world.leads:
            return choice
        return fit.replace_recomputation(choice, "Selective", recipe, world, 64)

    pytest.MonkeyPatch().setattr(fit, "decide", decide_for_own_gpu)
    recipe = networks.recipe(base, activationCheckpointing="Auto")
    verdicts: list[Verdict] = []
    plans: list[str] = []
    build.build_network(
        recipe,
        base,
        load_tokenizer(recipe.model, base),
        world,
        base / "teacher",
        on_plan=lambda plan: plans.append(plan.activation_checkpointing),
        on_verdict=verdicts.append,
    )
    torch.save((plans, [verdict.kind for verdict in verdicts]), base / f"plans-{world.rank}.pt")


def test_ranks_on_different_gpus_use_the_same_activation_checkpointing(
    one_layer: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(one_layer, base)
    networks.on_ranks(RANKS, tmp_path / "rendezvous", rank_on_its_own_gpu, base)
    for rank in range(RANKS):
        assert torch.load(base / f"plans-{rank}.pt") == (["Selective"], ["Selective"])


def test_ranks_agree_on_full_recomputation(one_layer: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(one_layer, base)
    networks.on_ranks(RANKS, tmp_path / "rendezvous", one_rank, base)
    for rank in range(RANKS):
        results = dict(zip(CASES, torch.load(base / f"gradients-{rank}.pt"), strict=True))
        # An adapter adds its product to that of the base, so that what the model changes is a sum, which is not saved.
        assert {method: results[method, "Selective"][0] for method in METHODS} == {
            "Full": ["Full"],
            "LoRA": ["Selective"],
            "QLoRA": ["Selective"],
        }
        for method in METHODS:
            torch.testing.assert_close(
                results[method, "Selective"][1], results[method, "None"][1], rtol=0, atol=0
            )
