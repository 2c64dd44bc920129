"""The ranks leave their groups together, and a rank that fails waits for no other."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from finetune_trainer.train.runtime import distributed
from finetune_trainer.train.runtime.device import Card

if TYPE_CHECKING:
    from pathlib import Path


# NB: no GPU is here, so what is asked of one is answered, and gloo plays NCCL.
@pytest.mark.parametrize(
    ("cuda", "error", "is_left"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_rank_that_fails_on_a_gpu_leaves_its_groups_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, cuda: bool, error: bool, is_left: bool
) -> None:
    begin = dist.init_process_group

    def joined(_backend: str, **options: Any) -> None:
        begin(
            "gloo",
            init_method=f"file://{tmp_path}/rendezvous",
            rank=0,
            world_size=1,
            timeout=options["timeout"],
        )

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(Card, "of", lambda _device: None)
    monkeypatch.setattr(dist, "init_process_group", joined)
    try:
        with suppress(ZeroDivisionError), distributed.join_ranks(timeout_seconds=60):
            _ = 1 / (0 if error else 1)
        assert dist.is_initialized() != is_left
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
