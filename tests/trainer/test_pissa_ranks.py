"""PiSSA on several ranks and over several attempts: the frozen weights are the same in each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds.checkpoint import Checkpoint
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.train import build
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.data import pack
from finetune_trainer.train.loop import take_step
from finetune_trainer.train.model.adapters import pissa
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from support import networks
from support.checkpoints import same

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

# The rows of a step, of which three ranks have four, four and four.
ROWS = 12
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Folders:
    """Where the base is, and where checkpoints are written."""

    base: Path
    checkpoints: Path

    def recipe(self, job: str, *, carries_on: str | None = None) -> Recipe:
        method = {"type": "LoRA", "lora": {"rank": 4, "dropout": 0.1, "init": "PiSSA"}}
        recipe = networks.recipe(self.base, method=method, learningRate=1e-2)
        spec: dict[str, Any] = {"uri": str(self.checkpoints), "mode": "Sync"}
        if carries_on is not None:
            (folder,) = self.checkpoints.glob(f"*{carries_on}*")
            spec["resumeFrom"] = {"type": "Uri", "uri": str(folder)}
        return recipe.model_copy(
            update={
                "job": recipe.job.model_copy(update={"name": job}),
                "checkpoint": Checkpoint.model_validate(spec),
            }
        )


def attempt(world: World, folders: Folders, made_of: Recipe, *, until: int, save: bool = True) -> State:
    """Take steps from the newest checkpoint, save, and return all weights, frozen ones too, and what is kept of them."""
    checkpointer = Checkpointer(made_of, world)
    resumed = checkpointer.find_newest()
    tokenizer = load_tokenizer(made_of.model, folders.base)
    network = build.build_network(
        made_of,
        folders.base,
        tokenizer,
        world,
        folders.base / "teacher",
        load_initial=checkpointer.load_initial if resumed else None,
    )
    optimizer = Optimizer(network, made_of.training, 10)
    if resumed is not None:
        checkpointer.load(resumed, network.model, optimizer.parts)
    split = networks.random_split(examples=ROWS)
    batch = pack.collate(split, [[row] for row in range(world.rank, ROWS, world.size)], pad_id=0)
    (count,) = world.sum_over_ranks(batch.targets_count)
    for step in range(resumed.step if resumed else 0, until):
        torch.manual_seed(step)
        take_step(network, optimizer, [batch], step=step, count=count, add_batch=lambda *_: None)
    if save:
        checkpointer.save(Progress(step=until), network.model, optimizer.parts, wait=True)
        assert checkpointer.failure is None
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
        for name, value in (*network.model.named_parameters(), *network.model.named_buffers())
    }


def again(*_: Any) -> None:
    raise AssertionError("a weight is decomposed again")


def test_a_run_that_was_ended_is_the_run_that_nobody_touched(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(base_model, tmp_path)
    with networks.alone() as world:
        untouched = attempt(world, folders, folders.recipe("untouched"), until=4, save=False)
        # It ends without a checkpoint, and what it began with is computed again.
        attempt(world, folders, folders.recipe("ended"), until=1, save=False)
        attempt(world, folders, folders.recipe("ended"), until=2)
        monkeypatch.setattr(pissa, "compute_truncated_svd", again)
        ended = attempt(world, folders, folders.recipe("ended"), until=4)
    assert same(ended, untouched)
    assert sum(pissa.is_initial(name) for name in ended) == 28


def on_three(world: World, folders: Folders) -> None:
    begun = attempt(world, folders, folders.recipe("three"), until=0, save=False)
    pissa.compute_truncated_svd = again  # type: ignore[assignment]
    carried_on = attempt(world, folders, folders.recipe("next", carries_on="one"), until=3)
    if world.leads:
        torch.save((begun, carried_on), folders.checkpoints / "three.pt")


def frozen(state: State) -> State:
    """The weights that lose their principal part, and what that is."""
    return {
        name: value
        for name, value in state.items()
        if pissa.is_initial(name) or name.endswith("base_layer.weight")
    }


def test_another_number_of_ranks_has_the_same_frozen_weights(base_model: Path, tmp_path: Path) -> None:
    """From the start, but for rounding; and bit for bit where another job carries the run on."""
    folders = Folders(base_model, tmp_path)
    with networks.alone() as world:
        begun = attempt(world, folders, folders.recipe("one"), until=0, save=False)
        attempt(world, folders, folders.recipe("one"), until=2)
    networks.on_ranks(3, tmp_path / "rendezvous", on_three, folders)
    on_ranks, carried_on = torch.load(tmp_path / "three.pt")
    torch.testing.assert_close(on_ranks, begun, rtol=1e-4, atol=1e-6)
    assert len(frozen(begun)) == 14 + 28
    assert same(frozen(carried_on), frozen(begun))
    second = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert not torch.equal(carried_on[second], begun[second])
