"""A rank says how it ended before anything else, and then ends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from finetune_trainer.outcome import PodFailure, TrainingError
from finetune_trainer.track import Tracker
from finetune_trainer.train import worker
from finetune_trainer.train.runtime import scratch
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.preemption import Preemption
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.contract import TerminationMessage


@pytest.mark.parametrize("in_groups", [True, False])
def test_a_rank_that_failed_ends_though_it_is_in_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, in_groups: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(scratch.ENV_SCRATCH, str(tmp_path))
    monkeypatch.setattr(worker, "quiet_libraries", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)

    def fails() -> TerminationMessage | None:
        raise TrainingError("Broken", "it broke", rank=3)

    monkeypatch.setattr(worker, "work", fails)
    if in_groups:
        with networks.alone():
            assert worker.main() == 1
    else:
        assert worker.main() == 1
    assert ended == ([1] if in_groups else [])
    written = scratch.read_outcome(tmp_path, 3)
    assert written is not None
    assert written.message.error is not None
    assert written.message.error.message == "it broke"


@pytest.mark.parametrize(
    ("error", "reason", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "OutOfMemory",
            "rank 3 needs more memory than its GPU has: lower training.perDeviceBatchSize or training.maxLength, or set "
            "training.activationCheckpointing to Full (CUDA out of memory. Tried to allocate 2.00 GiB.)",
        ),
        (
            dist.DistBackendError("NCCL error in: a link is down\nmore"),
            "PeerLost",
            "a collective failed, as it does where another rank ended (NCCL error in: a link is down): the log of the rank that "
            "failed first has the cause",
        ),
    ],
)
def test_what_a_gpu_says_is_told(error: Exception, reason: str, sentence: str) -> None:
    failure = worker.explained(error, rank=3)
    assert isinstance(failure, TrainingError)
    assert (failure.reason, failure.message, failure.rank) == (reason, sentence, 3)


def test_other_errors_are_told_as_they_are() -> None:
    error = ValueError("something else")
    assert worker.explained(error, rank=3) is error


def test_a_precision_that_a_gpu_lacks_is_refused_before_the_base_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(scratch.ENV_SCRATCH, str(tmp_path))
    recipe = networks.recipe(tmp_path / "missing", precision="BF16")
    with networks.alone() as world:
        old = replace(world, card=Card("Tesla T4", 15 * 2**30, (7, 5)))
        run = worker.Run(recipe, old, Tracker(None), Preemption(), started=0)
        with pytest.raises(PodFailure, match="compute capability"):
            run.train()
