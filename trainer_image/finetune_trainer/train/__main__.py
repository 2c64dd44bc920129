"""`finetune-train`: the command of training pods; with --plan, shows on a laptop whether a recipe fits into memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.pod import exit_status
from finetune_trainer.train.launch import launch

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Launch this pod's workers, or plan a step; returns the exit code.

    Args:
        argv: the arguments; None for the arguments of the process.
    """
    arguments = _build_parser().parse_args(argv)
    if not arguments.plan:
        return exit_status.run(launch)
    # torch takes seconds to import, and the process that launches workers does not need it.
    from finetune_trainer.train import plan

    return exit_status.run(lambda: plan.print_plan(config=arguments.config, gpu_memory=arguments.gpu_memory))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("finetune-train", description="Train by the recipe at FINETUNE_RECIPE.")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the memory and the collectives of a training step without weights, GPUs or data, then exit",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="folder with the config.json of the model; default: the config of model.base",
    )
    parser.add_argument(
        "--gpu-memory", type=float, help="memory of a GPU in GiB; default: from distributed.gpu.product"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
