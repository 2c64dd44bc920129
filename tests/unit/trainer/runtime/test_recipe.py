"""What of a recipe is refused, and in which words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.recipe import Recipe
from finetune_trainer.train.runtime.recipe import find_contradictions

if TYPE_CHECKING:
    from support.pods import Pod

TEACHER = {"teacher": "/models/teacher"}
PREFERENCES = {"type": "Preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
NO_PACKING = {"training.packing": False}
WSD = {"training.scheduler": "WSD"}
NO_WARMUP_STEPS = {"training.warmupSteps": None}
WITHOUT_VIRTUAL_TOKENS = (
    "virtual tokens are lost under packing, compile and activation checkpointing: set training.packing and "
    "training.compile to false and training.activationCheckpointing to None"
)
TOGETHER = "objective DPO or ORPO or SimPO and data.columns of type Preference go together"
UNPAIRED = {"type": "Unpaired"}
KTO_TOGETHER = "objective KTO and data.columns of type Unpaired go together"

TABLE: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"method.type": "LoRA", "method.export": "Merged", "method.lora": {"rank": 4}}, []),
    ({"method.type": "DoRA", "method.export": "Merged", "method.lora": {"rank": 4}}, []),
    ({"method.type": "QLoRA", "method.quantization": {"type": "FP4"}, "method.lora": {}}, []),
    ({"method": {"type": "PrefixTuning", "softPrompt": {}}, **NO_PACKING}, []),
    ({"method": {"type": "PromptTuning", "softPrompt": {}}, **NO_PACKING}, []),
    ({"objective.type": "DPO", "data.columns": PREFERENCES}, []),
    ({"method.type": "QLoRA", "objective.type": "DPO", "data.columns": PREFERENCES}, []),
    (
        {
            "method.type": "QLoRA",
            "objective": {"type": "KTO", "kto": {"beta": 0.2}},
            "data.columns": UNPAIRED,
        },
        [],
    ),
    ({"objective": {"type": "ORPO", "orpo": {"weight": 0.2}}, "data.columns": PREFERENCES}, []),
    (
        {
            "objective": {"type": "SimPO", "simpo": {"beta": 2.5, "gamma": 1}},
            "data.columns": PREFERENCES,
            "training.neftuneAlpha": 5,
        },
        [],
    ),
    ({"objective": {"type": "DPO", "dpo": {"loss": "IPO"}}, "data.columns": PREFERENCES}, []),
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
        {"method.type": "PrefixTuning", "objective.type": "KTO", "data.columns": UNPAIRED, **NO_PACKING},
        ["objective KTO works with method Full, LoRA, QLoRA or DoRA"],
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
    ({"objective": {"type": "SFT", "labelSmoothing": 0.1}}, []),
    (
        {
            "objective": {"type": "DPO", "labelSmoothing": 0.1, "dpo": {"labelSmoothing": 0.1}},
            "data.columns": PREFERENCES,
        },
        ["objective.labelSmoothing needs type SFT: for DPO set objective.dpo.labelSmoothing"],
    ),
    ({"objective.dpo": {"beta": 0.2}}, ["objective.dpo needs type DPO"]),
    ({"objective.kto": {"beta": 0.2}}, ["objective.kto needs type KTO"]),
    (
        {"objective.orpo": {}, "objective.simpo": {}},
        ["objective.orpo needs type ORPO", "objective.simpo needs type SimPO"],
    ),
    (
        {
            "objective": {"type": "DPO", "dpo": {"loss": "IPO", "labelSmoothing": 0.1}},
            "data.columns": PREFERENCES,
        },
        ["objective.dpo.labelSmoothing needs objective.dpo.loss: Sigmoid"],
    ),
    (
        {"method.type": "PrefixTuning", "objective.type": "SimPO", "data.columns": PREFERENCES, **NO_PACKING},
        ["objective SimPO works with method Full, LoRA, QLoRA or DoRA"],
    ),
    ({"method.type": "PromptTuning", **NO_PACKING, "training.neftuneAlpha": 0}, []),
    (
        {"method.type": "PromptTuning", **NO_PACKING, "training.neftuneAlpha": 5},
        [
            "training.neftuneAlpha works with method Full, LoRA, QLoRA or DoRA: the embeddings of virtual tokens get no noise"
        ],
    ),
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
    ({"objective.type": "ORPO"}, [TOGETHER]),
    ({"objective.type": "ORPO", "data.columns": UNPAIRED}, [TOGETHER, KTO_TOGETHER]),
    ({"objective.type": "KTO"}, [KTO_TOGETHER]),
    ({"objective.type": "DPO", "data.columns": UNPAIRED}, [TOGETHER, KTO_TOGETHER]),
    (
        {"data.columns": {"type": "Text"}, "objective.lossOn": "Answer"},
        [
            "objective.lossOn Answer and LastAnswer need data.columns of type PromptResponse or Messages: a text has no answer",
        ],
    ),
    (
        {"data.columns": {"type": "Text", "messageWeight": "train"}},
        ["data.columns.messageWeight needs type Messages: preferences are judged by whole answers"],
    ),
    ({"data.columns": {"type": "Messages", "messageWeight": "train"}, "objective.lossOn": "LastAnswer"}, []),
    (
        {"data.columns": {"type": "Messages", "messageWeight": "train"}, "objective.lossOn": "All"},
        [
            "data.columns.messageWeight says which answers the loss is on, and objective.lossOn All takes it on every token: remove "
            "one of them",
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
    ({**WSD, "training.decaySteps": 10, "training.warmupSteps": 2, "training.maxSteps": 12}, []),
    ({**WSD, **NO_WARMUP_STEPS, "training.decayRatio": 0.3, "training.warmupRatio": 0.7}, []),
    ({**WSD, "training.minLearningRate": 1e-6, "training.learningRate": 1e-5}, []),
    (
        {**WSD, "training.decaySteps": 2, "training.decayRatio": 0.1},
        ["training.decaySteps and training.decayRatio are both set: remove one"],
    ),
    *(
        ({decay: value}, ["training.decaySteps and training.decayRatio need training.scheduler: WSD"])
        for decay, value in (("training.decaySteps", 2), ("training.decayRatio", 0.1))
    ),
    (
        {**WSD, **NO_WARMUP_STEPS, "training.decayRatio": 0.4, "training.warmupRatio": 0.7},
        ["training.warmupRatio and training.decayRatio together are above 1: lower one of them"],
    ),
    (
        {**WSD, "training.decaySteps": 10, "training.warmupSteps": 3, "training.maxSteps": 12},
        ["training.decaySteps and the warm-up are longer than training.maxSteps: lower one of them"],
    ),
    (
        {"training.minLearningRate": 1e-6, "training.scheduler": "Constant"},
        ["training.minLearningRate needs training.scheduler Linear, Cosine or WSD"],
    ),
    (
        {**WSD, "training.minLearningRate": 1e-5, "training.learningRate": 1e-5},
        ["training.minLearningRate is not below training.learningRate, 1e-05: lower it"],
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
    *(
        (
            {"model.adapter": "Continue", "method": method},
            [
                "model.adapter: Continue needs method LoRA, QLoRA or DoRA without method.lora: the adapter has its own rank "
                "and layers"
            ],
        )
        for method in (
            {"type": "Full"},
            {"type": "LoRA", "lora": {"rank": 8}},
            {"type": "LoRA", "lora": {"init": "PiSSA"}},
        )
    ),
    ({"model.adapter": "Continue", "method": {"type": "DoRA"}}, []),
    (
        {"method": {"type": "LoRA", "lora": {"targetModules": ["q_proj"], "modulesToSave": ["q_proj"]}}},
        [
            "a layer of method.lora.modulesToSave is trained whole and has no adapter: remove it from targetModules"
        ],
    ),
    *(
        (
            {"method": {"type": method, "lora": {"init": "PiSSA"}}},
            [
                "method.lora.init: PiSSA needs type LoRA: it changes the frozen weights, which QLoRA rounds to four bits and DoRA "
                "takes norms of"
            ],
        )
        for method in ("QLoRA", "DoRA")
    ),
    ({"method": {"type": "LoRA", "lora": {"init": "PiSSA"}}}, []),
    ({"method": {"type": "LoRA", "lora": {"init": "PiSSA", "rank": 512}}}, []),
    ({"method": {"type": "LoRA", "lora": {"rank": 1024}}}, []),
    (
        {"method": {"type": "LoRA", "lora": {"init": "PiSSA", "rank": 513}}},
        [
            "method.lora.rank is at most 512 with init: PiSSA, whose registered adapter has twice the rank: lower it"
        ],
    ),
    ({"model.newTokens": ["<a>"], "method": {"type": "Full"}}, []),
    ({"model.newTokens": ["<a>"], "method": {"type": "QLoRA", "export": "Merged"}}, []),
    (
        {"model.newTokens": ["<a>"], "model.adapter": "Continue", "method": {"type": "LoRA"}},
        [
            "model.newTokens needs model.adapter: Merge, since an adapter keeps its vocabulary",
            "model.newTokens with an adapter needs method.export: Merged, since the base has no rows for them",
        ],
    ),
    (
        {"model.newTokens": ["<a>"], "method": {"type": "PromptTuning"}, "training.packing": False},
        ["model.newTokens works with method Full, LoRA, QLoRA or DoRA: virtual tokens train no embedding"],
    ),
    (
        {
            "model.newTokens": ["<a>"],
            "objective": {"type": "Distillation", "distillation": {"teacher": "/t"}},
        },
        ["model.newTokens does not work with objective Distillation, whose teacher has no rows for them"],
    ),
    (
        {"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Job", "name": "a"}}},
        [
            "checkpoint.resumeFrom in a recipe needs type Uri and uri: a pod does not know the jobs of a cluster"
        ],
    ),
    ({"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Uri", "uri": "/c/a"}}}, []),
    ({"training.optimizer": {"type": "Muon", "momentum": 0.9}}, []),
    ({"training.optimizer": {"type": "AdamW8bit", "weights": "BF16"}, "training.precision": "BF16"}, []),
    (
        {
            "training.optimizer": {"type": "Muon", "weights": "BF16"},
            "method": {"type": "LoRA"},
            "training.precision": "FP16",
        },
        [
            "training.optimizer.type Muon needs method Full: set AdamW or AdamW8bit",
            "training.optimizer.weights BF16 needs method Full: adapters are small, and the base under them is not kept in fp32",
            "training.optimizer.weights BF16 needs training.precision BF16",
            "training.optimizer.weights BF16 needs training.optimizer.type AdamW or AdamW8bit",
        ],
    ),
    (
        {"training.optimizer": {"type": "AdamW8bit", "momentum": 0.9}},
        ["training.optimizer.momentum needs training.optimizer.type Muon"],
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
    assert find_contradictions(Recipe.model_validate(pod.but(changes).recipe)) == expected
