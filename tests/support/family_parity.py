"""Losses and gradients of a tiny model as the trainer computes them, and as the model does with eager attention."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.weights import merge
from support import families, networks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

RECOMPUTATIONS = ("None", "Selective", "Full")
WARNINGS = (
    *networks.PEFT_WARNINGS,
    # The layers of OPT and XLM return a view, and nothing changes it in place.
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning",
)
"""Of libraries, which change no gradient."""
_TOLERANCE = 1e-3
# A gradient that is smaller than this share of all of them is compared as one of this size.
_LEAST = 1e-4


@dataclass(frozen=True)
class Gradients:
    """The sum of the losses of a split, and its gradients by the names of the weights."""

    loss: float
    of_weights: dict[str, torch.Tensor]

    def difference(self, reference: Gradients) -> tuple[float, str]:
        """Return the greatest difference as a share of the reference, and of what."""
        total = torch.stack([slope.norm() for slope in reference.of_weights.values()]).norm().item()
        shares = {"the loss": abs(self.loss - reference.loss) / abs(reference.loss)}
        for name, slope in reference.of_weights.items():
            distance = (self.of_weights[name] - slope).norm().item()
            shares[name] = distance / max(slope.norm().item(), _LEAST * total)
        # NB: no number is greater than NaN.
        name = max(shares, key=lambda each: float("inf") if math.isnan(shares[each]) else shares[each])
        return shares[name], name


def train(model: Any) -> None:
    """Put a model into training mode, but for routers: PhiMoE's draws its experts at random there."""
    model.train()
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.eval()


@contextmanager
def on_one_thread() -> Iterator[World]:
    """A process group of this process, which computes on one thread: models this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with networks.alone() as world:
            yield world
    finally:
        torch.set_num_threads(threads)


def split() -> Split:
    return networks.random_split(examples=4)


def eager(base: Path) -> Gradients:
    """Compute each document alone with the model's own forward pass and eager attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    train(model)
    documents = split()
    total = torch.zeros(())
    for begin, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.tokens[begin:end]).long()
        learned = torch.from_numpy(documents.loss_mask[begin + 1 : end])
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].float()
        total = total + functional.cross_entropy(logits[learned], ids[1:][learned], reduction="sum")
    total.backward()
    return Gradients(total.item(), _gradients(model))


def outcome(base: Path, world: World, *, packing: bool, recomputation: str, reference: Gradients) -> str:
    """Return what the trainer does with a model: `families.TRAINED`, why it refuses it, or which gradient is wrong by how much."""
    recipe = networks.recipe(base, packing=packing, activationCheckpointing=recomputation)
    try:
        merge.fetch(
            recipe.model,
            base / "fetched",
            world,
            check=lambda config: build.check_base(recipe, config, world),
        )
        network = networks.build(recipe, base, world)
    except PodFailure as error:
        return error.message.replace(str(base), "BASE")
    train(network)
    documents = split()
    rows = [[0, 1], [2, 3]] if packing else [[0], [1], [2], [3]]
    loss, _ = network(pack.collate(documents, rows, pad_id=1))
    loss.backward()
    slopes = {
        name.replace("_checkpoint_wrapped_module.", ""): slope
        for name, slope in _gradients(network.base).items()
    }
    share, name = Gradients(loss.item(), slopes).difference(reference)
    return families.TRAINED if share < _TOLERANCE else f"{name} differs by {share:.1%}"


def reward_outcome(model_type: str, folder: Path, world: World) -> str:
    """Return what the trainer does with a family as a reward model: `families.TRAINED`, why it refuses it, or what is wrong by how much."""
    base = families.save(model_type, folder)
    recipe = networks.recipe(base, objective={"type": "RewardModel"})
    try:
        merge.fetch(
            recipe.model,
            base / "fetched",
            world,
            check=lambda config: build.check_base(recipe, config, world),
        )
        network = networks.build(recipe, base, world)
    except PodFailure as error:
        return error.message.replace(str(base), "BASE")
    train(network)
    documents = networks.random_split(documents=2, examples=2)
    loss, _ = network(pack.collate(documents, [[0, 1]], pad_id=1))
    loss.backward()
    reference = _rank_alone(base, documents, _gather(network.head.layer.weight))
    share, name = Gradients(loss.item(), _gradients(network.base)).difference(reference)
    return families.TRAINED if share < _TOLERANCE else f"{name} differs by {share:.1%}"


def _rank_alone(base: Path, documents: Split, score: torch.Tensor) -> Gradients:
    """Compute the reward of each document alone with transformers' class, eager attention and a score head."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager", num_labels=1
    )
    with torch.no_grad():
        model.score.weight.copy_(score)
    train(model)
    rewards = torch.cat(
        [
            model(
                input_ids=torch.from_numpy(documents.tokens[begin:end]).long()[None], use_cache=False
            ).logits[0]
            for begin, end in pairwise(documents.offsets.tolist())
        ]
    )
    total = -functional.logsigmoid(rewards[::2] - rewards[1::2]).sum()
    total.backward()
    return Gradients(total.item(), _gradients(model))


def _gather(weight: Any) -> torch.Tensor:
    full: torch.Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.detach()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of all weights; of weights without one, such as those of an expert without tokens, zero."""
    slopes = {}
    for name, weight in model.named_parameters():
        slope = torch.zeros_like(weight) if weight.grad is None else weight.grad
        slopes[name] = (slope.full_tensor() if hasattr(slope, "full_tensor") else slope).detach()
    return slopes


def check(model_type: str, folder: Path, world: World, runs: Iterable[tuple[bool, str]]) -> None:
    """Check what the trainer does with a family.

    Args:
        model_type: the family.
        folder: an empty folder.
        world: a process group.
        runs: whether rows are packed, and the activation checkpointing.

    Raises:
        AssertionError: something else than the table says.
    """
    base = families.save(model_type, folder)
    reference = eager(base)
    outcomes, expected = {}, {}
    for packing, recomputation in runs:
        run = f"packing {packing}, activationCheckpointing {recomputation}"
        expected[run] = families.expected_outcome(model_type, packing=packing, recomputation=recomputation)
        outcomes[run] = outcome(
            base, world, packing=packing, recomputation=recomputation, reference=reference
        )[: len(expected[run])]
    assert outcomes == expected
