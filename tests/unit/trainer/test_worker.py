"""A rank says how it ended before anything else, and then ends."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.exit_status import PodFailure, TrainingError
from finetune_trainer.pod.mlflow_run import Tracker
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
