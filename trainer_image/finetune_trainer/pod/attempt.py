"""The attempt of the job that this pod belongs to."""

from __future__ import annotations

import os

from finetune_crds.contract import ENV_ATTEMPT


def read_attempt() -> int:
    """Return the attempt that the operator sets; 1 without the operator."""
    return int(os.environ.get(ENV_ATTEMPT, "1"))
