"""What of a recipe is refused, and in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.recipe import Recipe
from finetune_trainer.train.recipe import refusals

if TYPE_CHECKING:
    from pods import Pod

TABLE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"method.type": "LoRA", "method.merge": True, "method.lora": {"rank": 4}}, []),
    ({"method.type": "QLoRA"}, ["method.type QLoRA is not available yet: use Full or LoRA"]),
    ({"method.type": "DoRA"}, ["method.type DoRA is not available yet: use Full or LoRA"]),
    ({"method.type": "PrefixTuning"}, ["method.type PrefixTuning is not available yet: use Full or LoRA"]),
    ({"method.type": "PromptTuning"}, ["method.type PromptTuning is not available yet: use Full or LoRA"]),
    ({"method.lora": {}}, ["method.lora needs method.type LoRA: remove it or change the type"]),
    ({"method.merge": True}, ["method.merge needs method.type LoRA: remove it or change the type"]),
    ({"objective.type": "DPO"}, ["objective.type DPO is not available yet: use SFT"]),
    ({"objective.type": "Distillation"}, ["objective.type Distillation is not available yet: use SFT"]),
    (
        {"data.columns": {"text": "text"}, "objective.lossOn": "Answer"},
        [
            "objective.lossOn Answer needs data.columns.prompt and response, or messages: a text has no answer",
        ],
    ),
    (
        {"data.splits": None},
        ["data.splits is missing: training reads splits that are prepared already"],
    ),
    ({"distributed.strategy": "HSDP"}, ["distributed.strategy HSDP is not available yet: use FSDP"]),
    ({"distributed.strategy": "DDP"}, ["distributed.strategy DDP is not available yet: use FSDP"]),
    (
        {"training.epochs": 1, "training.maxSteps": 2},
        ["training.epochs and training.maxSteps are both set: remove one"],
    ),
    (
        {"training.warmupSteps": 1, "training.warmupRatio": 0.1},
        ["training.warmupSteps and training.warmupRatio are both set: remove one"],
    ),
    (
        {"training.activationCheckpointing": "Selective"},
        ["training.activationCheckpointing Selective is not available yet: use None or Full"],
    ),
    ({"training.compile": True}, ["training.compile is not available yet: set it to false"]),
    ({"training.loadBest": True}, ["training.loadBest is not available yet: set it to false"]),
    (
        {"method.type": "QLoRA", "training.compile": True},
        [
            "method.type QLoRA is not available yet: use Full or LoRA",
            "training.compile is not available yet: set it to false",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TABLE)
def test_what_is_not_available_is_refused_by_name(
    pod: Pod, changes: dict[str, Any], expected: list[str]
) -> None:
    assert refusals(Recipe.model_validate(pod.but(changes).recipe)) == expected
