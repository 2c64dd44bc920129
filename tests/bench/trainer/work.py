"""The configuration of the contenders: the same for all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

ENV_WORK = "BENCH_WORK"
LEARNING_RATE = 1e-4
MAX_LENGTH = 2048
LORA_RANK, LORA_ALPHA = 16, 32
SEED = 17


@dataclass(frozen=True)
class Work:
    """Train `model` on `rows` for `steps` steps, the first `warmup` of which are not measured.

    rows: JSON lines with a `text`, to each of which the tokenizer's end-of-sequence token is added.
    probe: rows in the same form that fit into one sequence; every contender takes its loss on them before it trains.
    row_tokens: tokens of a row, the mean.
    sequences: sequences of `max_length` tokens that a rank takes in a step.
    out: folder for what the processes measure.
    """

    model: str
    rows: str
    probe: str
    row_tokens: float
    out: str
    method: str
    precision: str
    sequences: int
    warmup: int
    steps: int
    processes: int
    max_length: int = MAX_LENGTH

    @property
    def all_steps(self) -> int:
        """Steps with the warm-up."""
        return self.warmup + self.steps

    @property
    def rows_of_a_sequence(self) -> int:
        """Rows that have as many tokens as a full sequence, on average."""
        return max(1, round(self.max_length / self.row_tokens))

    def save(self, path: Path) -> dict[str, str]:
        """Write it, and return the environment in which `load` finds it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return {ENV_WORK: str(path)}

    @classmethod
    def load(cls) -> Work:
        """The work that the environment names."""
        return cls(**json.loads(Path(os.environ[ENV_WORK]).read_text(encoding="utf-8")))
