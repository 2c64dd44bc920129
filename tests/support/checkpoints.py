"""A small sharded model in training, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from finetune_crds.recipe import Recipe
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.model.optimizer.compact_adamw import CompactAdamW
from finetune_trainer.train.model.optimizer.muon import Muon
from finetune_trainer.train.runtime.distributed import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RATE = 1e-2


def recipe_for(
    folder: Path | str, job: str = "tiny", parts: dict[str, Any] | None = None, **checkpoint: Any
) -> Recipe:
    """A recipe that checkpoints each step, with other options and parts."""
    return Recipe.model_validate(
        {
            "job": {"name": job, "namespace": "tests", "uid": f"{job}-0123456789abcdef"},
            "model": {"base": "/models/tiny"},
            "data": {
                "columns": {"type": "Text", "text": "text"},
                "splits": {"type": "Delta", "path": "/corpus", "version": 0},
            },
            "checkpoint": {"uri": str(folder), "everySteps": 1, **checkpoint},
            **(parts or {}),
        }
    )


def save_of(folder: Path, step: int) -> Path:
    """The folder with the shards and the marker of a step that one generation of pods has written."""
    (save,) = (folder / f"step-{step:08d}").glob("attempt-*")
    return save


def complete_steps(checkpoints: Path) -> list[int]:
    """The steps of the complete checkpoints of the jobs in a folder."""
    markers = checkpoints.glob("*/step-*/*/COMPLETE")
    return sorted({int(marker.parent.parent.name.removeprefix("step-")) for marker in markers})


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW over all of a model."""
    return [torch.optim.AdamW(model.parameters(), lr=RATE)]


def compact(model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW with moments of 8 bits over all of a model."""
    groups = [{"params": list(model.parameters())}]
    return [CompactAdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8, eight_bit=True, seed=7)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon over the matrices of a model, and AdamW over its biases."""
    weights = list(model.parameters())
    return [
        Muon([weight for weight in weights if weight.ndim == 2], lr=RATE),
        torch.optim.AdamW([weight for weight in weights if weight.ndim != 2], lr=RATE, fused=True),
    ]


@dataclass
class Run:
    """A sharded model in training, and its checkpoints; made anew, as the next attempt does."""

    folder: Path | str
    world: World
    options: dict[str, Any] = field(default_factory=dict)
    width: int = 32
    published: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    job: str = "tiny"
    parts: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optimizers_of: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] = adamw

    def __post_init__(self) -> None:
        recipe = recipe_for(self.folder, self.job, self.parts, **self.options)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, self.width), nn.Linear(self.width, 8)).to(self.dtype)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world.size,)))
        self.model.set_force_sum_reduction_for_comms(True)
        self.optimizers = self.optimizers_of(self.model)
        self.checkpointer = Checkpointer(
            recipe,
            self.world,
            on_published=self.published.append,
            on_failed=lambda step, sentence: self.failed.append((step, sentence)),
        )
        self.progress = Progress()

    @property
    def steps(self) -> Path:
        """Where the folders of the steps are."""
        return Path(self.checkpointer.folder)

    def train(self) -> None:
        """One step, the same for any number of ranks."""
        step = self.progress.step
        torch.manual_seed(step)
        self.model(torch.randn(4, 16, dtype=self.dtype)).pow(2).mean().backward()
        for optimizer in self.optimizers:
            if isinstance(optimizer, CompactAdamW):
                optimizer.number = step
            optimizer.step()
            optimizer.zero_grad()
        self.progress = replace(self.progress, step=step + 1)

    def save(self, *, wait: bool = True, best: bool = False) -> None:
        self.checkpointer.save(self.progress, self.model, self.optimizers, wait=wait, best=best)

    def train_and_save(self, steps: int, *, best: int | None = None) -> None:
        for _ in range(steps):
            self.train()
            self.save(best=self.progress.step == best)

    def next_job(self, uri: Path | str, **parts: Any) -> Run:
        """A job that carries this one on."""
        options = {**self.options, "resumeFrom": {"type": "Uri", "uri": str(uri)}}
        return Run(self.folder, self.world, options, job="next", parts=parts)

    def resume(self) -> Progress:
        newest = self.checkpointer.find_newest()
        assert newest is not None
        self.checkpointer.load(newest, self.model, self.optimizers)
        self.progress = newest
        return newest

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and the optimizer's moments, whole, by name."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.full_tensor().detach().clone()
            states = [
                optimizer.state[parameter] for optimizer in self.optimizers if parameter in optimizer.state
            ]
            for moment, value in (entry for state in states for entry in state.items()):
                full_moment = value.full_tensor() if hasattr(value, "full_tensor") else value
                tensors[f"{name} {moment}"] = full_moment.clone()
        return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
