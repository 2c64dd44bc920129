"""The folder of this machine that keeps what takes long to build or download."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """The folder in FINETUNE_CACHE, or `~/.cache/finetune-operator`."""
    configured = os.environ.get("FINETUNE_CACHE")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "finetune-operator"
