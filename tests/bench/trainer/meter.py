"""Tokens and seconds of each step, measured inside a rank."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch


class Meter:
    """Notes when steps end; `save` writes what `contenders` reads."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []
        self._began = time.monotonic()

    def step(self, tokens: int) -> None:
        """A step with so many tokens of this rank, padding left out, has ended."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self._steps.append((tokens, now - self._began))
        self._began = now

    def save(self, folder: str, description: str) -> None:
        """Write the steps of this rank, and how it trained in words."""
        found = {"steps": self._steps, "description": description}
        Path(folder, f"steps-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
