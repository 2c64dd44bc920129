"""What of a recipe is refused, and in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.recipe import Recipe
from finetune_trainer.train.runtime.recipe import refusals

if TYPE_CHECKING:
    from support.pods import Pod

TEACHER = {"teacher": "/models/teacher"}
PREFERENCES = {"type": "Preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
NO_PACKING = {"training.packing": False}
WITHOUT_VIRTUAL_TOKENS = (
    "virtual tokens are lost under packing, compile and activation checkpointing: set training.packing and "
    "training.compile to false and training.activationCheckpointing to None"
)
TOGETHER = "objective DPO and data.columns of type Preference go together"

TABLE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"method.type": "LoRA", "method.export": "Merged", "method.lora": {"rank": 4}}, []),
    ({"method.type": "DoRA", "method.export": "Merged", "method.lora": {"rank": 4}}, []),
    ({"method.type": "QLoRA", "method.quantization": {"type": "FP4"}, "method.lora": {}}, []),
    ({"method": {"type": "PrefixTuning", "softPrompt": {}}, **NO_PACKING}, []),
    ({"method": {"type": "PromptTuning", "softPrompt": {}}, **NO_PACKING}, []),
    ({"objective.type": "DPO", "data.columns": PREFERENCES}, []),
    ({"method.type": "QLoRA", "objective.type": "DPO", "data.columns": PREFERENCES}, []),
    ({"method.type": "DoRA", "objective": {"type": "Distillation", "distillation": TEACHER}}, []),
    ({"distributed.strategy": "HSDP", "training.compile": True}, []),
    ({"training.select": "Best", "training.evalEverySteps": 2, "checkpoint": {"uri": "/checkpoints"}}, []),
    ({"method.lora": {}}, ["method.lora needs type LoRA, QLoRA or DoRA"]),
    (
        {"method": {"type": "PromptTuning", "lora": {}}, **NO_PACKING},
        ["method.lora needs type LoRA, QLoRA or DoRA"],
    ),
    ({"method": {"type": "LoRA", "quantization": {}}}, ["method.quantization needs type QLoRA"]),
    (
        {"method": {"type": "LoRA", "softPrompt": {}}},
        ["method.softPrompt needs type PrefixTuning or PromptTuning"],
    ),
    ({"method.export": "Merged"}, ["method.export: Merged needs type LoRA, QLoRA or DoRA"]),
    (
        {"method.type": "PrefixTuning", "objective.type": "DPO", "data.columns": PREFERENCES, **NO_PACKING},
        ["objective DPO works with method Full, LoRA, QLoRA or DoRA"],
    ),
    (
        {
            "method.type": "PromptTuning",
            "objective": {"type": "Distillation", "distillation": TEACHER},
            **NO_PACKING,
        },
        ["objective Distillation works with method Full, LoRA or DoRA"],
    ),
    (
        {"method.type": "QLoRA", "objective": {"type": "Distillation", "distillation": TEACHER}},
        ["objective Distillation works with method Full, LoRA or DoRA"],
    ),
    (
        {"method": {"type": "PrefixTuning", "softPrompt": {"initText": "Answer:"}}, **NO_PACKING},
        ["method.softPrompt.initText needs type PromptTuning"],
    ),
    (
        {"objective": {"type": "DPO", "lossOn": "All"}, "data.columns": PREFERENCES},
        ["objective.lossOn needs type SFT"],
    ),
    ({"objective.dpo": {"beta": 0.2}}, ["objective.dpo needs type DPO"]),
    ({"method.type": "PrefixTuning"}, [WITHOUT_VIRTUAL_TOKENS]),
    (
        {"method.type": "PromptTuning", **NO_PACKING, "training.activationCheckpointing": "Auto"},
        [WITHOUT_VIRTUAL_TOKENS],
    ),
    ({"method.type": "PromptTuning", **NO_PACKING, "training.compile": True}, [WITHOUT_VIRTUAL_TOKENS]),
    (
        {"objective.type": "Distillation"},
        ["objective.distillation and type Distillation require each other"],
    ),
    (
        {"objective.distillation": TEACHER},
        ["objective.distillation and type Distillation require each other"],
    ),
    ({"objective.type": "DPO"}, [TOGETHER]),
    ({"data.columns": PREFERENCES}, [TOGETHER]),
    (
        {"data.columns": {"type": "Text"}, "objective.lossOn": "Answer"},
        [
            "objective.lossOn Answer needs data.columns of type PromptResponse or Messages: a text has no answer",
        ],
    ),
    (
        {"data.splits": None},
        ["data.splits is missing: training reads splits that are prepared already"],
    ),
    (
        {"training.epochs": 1, "training.maxSteps": 2},
        ["training.epochs and training.maxSteps are both set: remove one"],
    ),
    (
        {"training.warmupSteps": 1, "training.warmupRatio": 0.1},
        ["training.warmupSteps and training.warmupRatio are both set: remove one"],
    ),
    (
        {"training.earlyStopping": {}},
        ["training.earlyStopping needs training.evalEverySteps"],
    ),
    ({"training.select": "Best"}, ["training.select: Best needs training.evalEverySteps and checkpoint"]),
    (
        {"training.select": "Best", "training.evalEverySteps": 2},
        ["training.select: Best needs training.evalEverySteps and checkpoint"],
    ),
    (
        {"method.export": "Merged", "training.earlyStopping": {}},
        [
            "method.export: Merged needs type LoRA, QLoRA or DoRA",
            "training.earlyStopping needs training.evalEverySteps",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TABLE)
def test_what_contradicts_itself_is_refused_by_name(
    pod: Pod, changes: dict[str, Any], expected: list[str]
) -> None:
    assert refusals(Recipe.model_validate(pod.but(changes).recipe)) == expected
