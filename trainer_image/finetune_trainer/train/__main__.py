"""`finetune-train`: what a training pod runs."""

from __future__ import annotations

import sys

from finetune_trainer import outcome
from finetune_trainer.train.launch import launch


def main() -> int:
    """Launch this pod's workers and return the pod's exit code."""
    return outcome.run(launch)


if __name__ == "__main__":
    sys.exit(main())
