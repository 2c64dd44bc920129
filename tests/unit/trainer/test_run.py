"""An attempt of the training on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.sinks.feed import Sinks
from finetune_trainer.train.run import Run
from finetune_trainer.train.runtime import scratch
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.preemption import Preemption
from support import networks

if TYPE_CHECKING:
    from pathlib import Path


def test_a_precision_that_a_gpu_lacks_is_refused_before_the_base_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(scratch.ENV_SCRATCH, str(tmp_path))
    recipe = networks.recipe(tmp_path / "missing", precision="BF16")
    with networks.alone() as world:
        old = replace(world, card=Card("Tesla T4", 15 * 2**30, (7, 5)))
        run = Run(recipe, old, Tracker(None), Sinks(), Preemption(), started=0)
        with pytest.raises(PodFailure, match="compute capability"):
            run.train()
