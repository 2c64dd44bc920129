"""Tokens and seconds of each step, measured inside a rank."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch


class Meter:
    """Notes when steps end; `save` writes what `contenders` reads.

    Attributes:
        loss: of the probe before the training, the mean of its tokens.
        gradient: norm of the gradients of the first step.
    """

    def __init__(self) -> None:
        self.loss = math.nan
        self.gradient = math.nan
        self._steps: list[tuple[int, int, float]] = []
        self._began = time.monotonic()

    def start(self) -> None:
        """The first step begins."""
        self._began = time.monotonic()

    def step(self, tokens: int, slots: int) -> None:
        """A step has ended.

        Args:
            tokens: of this rank, padding left out.
            slots: with the padding.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        self._steps.append((tokens, slots, now - self._began))
        self._began = now

    def save(self, folder: str, description: str) -> None:
        """Write the steps of this rank, and how it trained in words."""
        measurements: dict[str, Any] = {
            "steps": self._steps,
            "description": description,
            "loss": self.loss,
            "gradient": self.gradient,
        }
        Path(folder, f"steps-{os.environ['RANK']}.json").write_text(
            json.dumps(measurements), encoding="utf-8"
        )
