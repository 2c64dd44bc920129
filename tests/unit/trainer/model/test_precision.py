"""A GPU computes in the precision that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model import precision
from finetune_trainer.train.runtime.device import Card
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

T4, A100 = Card("Tesla T4", 15 * 2**30, (7, 5)), Card("NVIDIA A100", 80 * 2**30, (8, 0))


@pytest.mark.parametrize(
    ("card", "of", "refused"),
    [
        (T4, "BF16", True),
        (T4, "FP16", False),
        (T4, "FP32", False),
        (A100, "BF16", False),
        (None, "BF16", False),
    ],
)
def test_a_precision_that_a_gpu_lacks_is_refused(
    base_model: Path, card: Card | None, of: str, *, refused: bool
) -> None:
    recipe = networks.recipe(base_model, precision=of)
    if not refused:
        precision.check(recipe, card)
        return
    with pytest.raises(RecipeRefusedError) as refusal:
        precision.check(recipe, card)
    assert str(refusal.value) == (
        "training.precision BF16, the default, requires a GPU of compute capability 8.0 or higher, but Tesla T4 "
        "has 7.5: set training.precision to FP16, or request another GPU"
    )


@pytest.mark.parametrize(
    ("card", "trained_in", "dtype"),
    [
        (None, "BF16", torch.float32),
        (T4, "BF16", torch.float16),
        (T4, "FP16", torch.float16),
        (T4, "FP32", torch.float32),
        (A100, "BF16", torch.bfloat16),
        (A100, "FP32", torch.bfloat16),
    ],
)
def test_an_evaluation_computes_in_what_its_gpu_has_and_the_model_can(
    card: Card | None, trained_in: str, dtype: torch.dtype
) -> None:
    assert precision.inference_dtype(card, trained_in) == dtype
