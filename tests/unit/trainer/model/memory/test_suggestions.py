"""What would fit in place of a job that does not: each suggestion is estimated as the job that follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune_trainer.train.model.memory import estimate, suggestions
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.shapes import small_shape

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

WORLD = World(0, 16, 0, 8, torch.device("cpu"))
ROW_TOKENS = 2048


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (16, "what would fit: distributed.strategy FSDP; 32 ranks with FSDP; method LoRA"),
        (32, "what would fit: 32 ranks with FSDP; method LoRA"),
    ],
)
def test_a_job_with_replicas_gets_suggestions_for_fsdp(ranks: int, expected: str) -> None:
    """FSDP accumulates gradients in the precision of the weights, but HSDP in fp32."""
    shape = small_shape()
    with_hsdp, with_fsdp = (
        networks.recipe(
            Path("/base"),
            strategy=strategy,
            precision="BF16",
            perDeviceBatchSize=1,
            gradientAccumulation=4,
            activationCheckpointing="Full",
            optimizer={"type": "AdamW8bit", "weights": "BF16"},
        )
        for strategy in ("HSDP", "FSDP")
    )
    limit = estimate.estimate(shape, with_fsdp, shards=ranks, row_tokens=ROW_TOKENS, recompute="Full").total
    assert (
        suggestions.suggest_changes(shape, with_hsdp, WORLD, row_tokens=ROW_TOKENS, limit=limit) == expected
    )
