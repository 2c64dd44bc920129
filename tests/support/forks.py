"""Ranks of the trainer as forks of one process that has imported what takes long."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "peft", "finetune_trainer.train.worker"]
_SECONDS = 300


def preloaded() -> Any:
    """The context that starts such forks; the process that they are forked off starts with the first of them."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    return multiprocessing.get_context("forkserver")


def run_workers(environments: list[dict[str, str]], log: Path) -> list[int]:
    """Run a trainer's worker in each environment, with its output appended to a log; returns their exit codes.

    Raises:
        TimeoutError: they did not end.
    """
    context = preloaded()
    workers = [context.Process(target=_work, args=(environment, log)) for environment in environments]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(_SECONDS)
            if worker.exitcode is None:
                raise TimeoutError(f"a worker did not end:\n{log.read_text(encoding='utf-8')[-3000:]}")
    finally:
        for worker in workers:
            worker.kill()
    return [worker.exitcode for worker in workers]


def _work(environment: dict[str, str], log: Path) -> None:
    import torch

    from finetune_trainer.train import worker

    os.environ.update(environment)
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.exit(worker.main())
