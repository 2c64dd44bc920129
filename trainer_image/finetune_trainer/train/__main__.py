"""`finetune-train`: what a training pod runs, and with --plan what shows on a laptop whether it would fit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.pod import exit_status
from finetune_trainer.train.launch import launch

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(given: Sequence[str] | None = None) -> int:
    """Launch this pod's workers, or plan a step; returns the exit code.

    Args:
        given: the arguments; None: those of the process.
    """
    arguments = _arguments().parse_args(given)
    if not arguments.plan:
        return exit_status.run(launch)
    # torch takes seconds to import, and a pod does not need it here.
    from finetune_trainer.train import plan

    return exit_status.run(lambda: plan.print_plan(config=arguments.config, gpu_memory=arguments.gpu_memory))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("finetune-train", description="Train as the recipe says.")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the memory and the collectives of a step, without weights, GPUs or data, and end",
    )
    parser.add_argument(
        "--config", type=Path, help="folder of the model's config.json; default: that of model.base"
    )
    parser.add_argument("--gpu-memory", type=float, help="GiB of a GPU; default: by distributed.gpu.product")
    return parser


if __name__ == "__main__":
    sys.exit(main())
