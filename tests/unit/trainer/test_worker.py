"""A rank says how it ended before anything else, and then ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.exit_status import TrainingError
from finetune_trainer.train import worker
from finetune_trainer.train.runtime import scratch
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
