"""The rules of the API on recipes: which a laptop refuses, and in which words."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.base import VALIDATIONS, Json
from finetune_crds.data import Columns
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.recipe import JobReference, Recipe
from finetune_crds.reference import sample_files
from finetune_crds.schema import Schema, crd
from finetune_trainer.pod import spec_rules
from finetune_trainer.pod.exit_status import RecipeRefusedError
from support.pods import Pod, tiny_recipe
from unit.trainer.prep.recipes import recipe

POD = Pod(Path("/pod"), tiny_recipe(Path("/models/base"), Path("/data/splits")))
TEACHER = {"teacher": "/models/teacher"}
PREFERENCES = {"type": "Preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
UNPAIRED = {"type": "Unpaired"}
# Columns of the source of a preparation.
PREFERRED = {"type": "Preference", "prompt": "question", "chosen": "good", "rejected": "bad"}
JUDGED = {"type": "Unpaired", "prompt": "question", "completion": "good", "label": "thumb"}
TEXT = {"type": "Text", "text": "body"}
CHAT = {"type": "Messages", "messages": "chat"}
KINDS = (FineTuneJob, ModelPromotion)


@cache
def schema_of(kind: type[FineTuneJob | ModelPromotion]) -> Schema:
    """The schema of a kind, with the fields of earlier versions."""
    schema: Schema = crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def training_recipe(changes: Json) -> Recipe:
    """The recipe of a training pod with some values changed, by dotted path."""
    return Recipe.model_validate(POD.but(changes).recipe)


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"method.type": "LoRA", "method.export": "Merged", "method.lora": {"rank": 4}},
    {"method.type": "DoRA", "method.export": "Merged", "method.lora": {"rank": 4}},
    {"method.type": "QLoRA", "method.quantization": {"type": "FP4"}, "method.lora": {}},
    {"method": {"type": "PrefixTuning", "softPrompt": {}}, "training.packing": False},
    {"method": {"type": "PromptTuning", "softPrompt": {}}, "training.packing": False},
    {"objective.type": "DPO", "data.columns": PREFERENCES},
    {"method.type": "QLoRA", "objective.type": "DPO", "data.columns": PREFERENCES},
    {"method.type": "QLoRA", "objective": {"type": "KTO", "kto": {"beta": 0.2}}, "data.columns": UNPAIRED},
    {"objective": {"type": "ORPO", "orpo": {"weight": 0.2}}, "data.columns": PREFERENCES},
    {
        "objective": {"type": "SimPO", "simpo": {"beta": 2.5, "gamma": 1}},
        "data.columns": PREFERENCES,
        "training.neftuneAlpha": 5,
    },
    {"objective": {"type": "DPO", "dpo": {"loss": "IPO"}}, "data.columns": PREFERENCES},
    {"method.type": "DoRA", "objective": {"type": "Distillation", "distillation": TEACHER}},
    {"distributed.strategy": "HSDP", "training.compile": True},
    {"training.select": "Best", "training.evalEverySteps": 2, "checkpoint": {"uri": "/checkpoints"}},
    {"objective": {"type": "SFT", "labelSmoothing": 0.1}},
    {"method.type": "PromptTuning", "training.packing": False, "training.neftuneAlpha": 0},
    {"data.columns": {"type": "Messages", "messageWeight": "train"}, "objective.lossOn": "LastAnswer"},
    {
        "training.scheduler": "WSD",
        "training.decaySteps": 10,
        "training.warmupSteps": 2,
        "training.maxSteps": 12,
    },
    {
        "training.scheduler": "WSD",
        "training.warmupSteps": None,
        "training.decayRatio": 0.3,
        "training.warmupRatio": 0.7,
    },
    {"training.scheduler": "WSD", "training.minLearningRate": 1e-06, "training.learningRate": 1e-05},
    {"model.adapter": "Continue", "method": {"type": "DoRA"}},
    {"method": {"type": "LoRA", "lora": {"init": "PiSSA"}}},
    {"method": {"type": "LoRA", "lora": {"init": "PiSSA", "rank": 512}}},
    {"method": {"type": "LoRA", "lora": {"rank": 1024}}},
    {"model.newTokens": ["<a>"], "method": {"type": "Full"}},
    {"model.newTokens": ["<a>"], "method": {"type": "QLoRA", "export": "Merged"}},
    {"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Uri", "uri": "/c/a"}}},
    {"training.optimizer": {"type": "Muon", "momentum": 0.9}},
    {"training.optimizer": {"type": "AdamW8bit", "weights": "BF16"}, "training.precision": "BF16"},
]
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"method.lora": {}},
        [
            "method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning"
        ],
    ),
    (
        {"method": {"type": "PromptTuning", "lora": {}}, "training.packing": False},
        [
            "method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning"
        ],
    ),
    (
        {"method": {"type": "LoRA", "quantization": {}}},
        [
            "method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning"
        ],
    ),
    (
        {"method": {"type": "LoRA", "softPrompt": {}}},
        [
            "method: set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning"
        ],
    ),
    ({"method.export": "Merged"}, ["method.export: export Merged requires type LoRA, QLoRA or DoRA"]),
    (
        {
            "method.type": "PrefixTuning",
            "objective.type": "DPO",
            "data.columns": PREFERENCES,
            "training.packing": False,
        },
        [
            "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
        ],
    ),
    (
        {
            "method.type": "PrefixTuning",
            "objective.type": "KTO",
            "data.columns": UNPAIRED,
            "training.packing": False,
        },
        [
            "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
        ],
    ),
    (
        {
            "method.type": "PromptTuning",
            "objective": {"type": "Distillation", "distillation": TEACHER},
            "training.packing": False,
        },
        [
            "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
        ],
    ),
    (
        {"method.type": "QLoRA", "objective": {"type": "Distillation", "distillation": TEACHER}},
        [
            "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
        ],
    ),
    (
        {
            "method": {"type": "PrefixTuning", "softPrompt": {"initText": "Answer:"}},
            "training.packing": False,
        },
        ["method.softPrompt.initText: softPrompt.initText can be set only when type is PromptTuning"],
    ),
    (
        {"objective": {"type": "DPO", "lossOn": "All"}, "data.columns": PREFERENCES},
        [
            "objective: lossOn and labelSmoothing can be set only when type is SFT: for DPO, set dpo.labelSmoothing"
        ],
    ),
    (
        {
            "objective": {"type": "DPO", "labelSmoothing": 0.1, "dpo": {"labelSmoothing": 0.1}},
            "data.columns": PREFERENCES,
        },
        [
            "objective: lossOn and labelSmoothing can be set only when type is SFT: for DPO, set dpo.labelSmoothing"
        ],
    ),
    (
        {"objective.dpo": {"beta": 0.2}},
        [
            "objective: set only the parameters of the type: dpo for DPO, kto for KTO, orpo for ORPO, simpo for SimPO and rewardModel for RewardModel; distillation is required for Distillation"
        ],
    ),
    (
        {"objective.kto": {"beta": 0.2}},
        [
            "objective: set only the parameters of the type: dpo for DPO, kto for KTO, orpo for ORPO, simpo for SimPO and rewardModel for RewardModel; distillation is required for Distillation"
        ],
    ),
    (
        {"objective.orpo": {}, "objective.simpo": {}},
        [
            "objective: set only the parameters of the type: dpo for DPO, kto for KTO, orpo for ORPO, simpo for SimPO and rewardModel for RewardModel; distillation is required for Distillation",
        ],
    ),
    (
        {
            "objective": {"type": "DPO", "dpo": {"loss": "IPO", "labelSmoothing": 0.1}},
            "data.columns": PREFERENCES,
        },
        ["objective.dpo.labelSmoothing: labelSmoothing must be 0 unless loss is Sigmoid"],
    ),
    (
        {
            "method.type": "PrefixTuning",
            "objective.type": "SimPO",
            "data.columns": PREFERENCES,
            "training.packing": False,
        },
        [
            "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
        ],
    ),
    (
        {"method.type": "PromptTuning", "training.packing": False, "training.neftuneAlpha": 5},
        [
            (
                "method.type PrefixTuning and PromptTuning require training.packing false, training.compile false, training.activationCheckpointing None and no training.neftuneAlpha"
            )
        ],
    ),
    (
        {"method.type": "PrefixTuning"},
        [
            (
                "method.type PrefixTuning and PromptTuning require training.packing false, training.compile false, training.activationCheckpointing None and no training.neftuneAlpha"
            )
        ],
    ),
    (
        {
            "method.type": "PromptTuning",
            "training.packing": False,
            "training.activationCheckpointing": "Auto",
        },
        [
            (
                "method.type PrefixTuning and PromptTuning require training.packing false, training.compile false, training.activationCheckpointing None and no training.neftuneAlpha"
            )
        ],
    ),
    (
        {"method.type": "PromptTuning", "training.packing": False, "training.compile": True},
        [
            (
                "method.type PrefixTuning and PromptTuning require training.packing false, training.compile false, training.activationCheckpointing None and no training.neftuneAlpha"
            )
        ],
    ),
    (
        {"objective.type": "Distillation"},
        [
            "objective: set only the parameters of the type: dpo for DPO, kto for KTO, orpo for ORPO, simpo for SimPO and rewardModel for RewardModel; distillation is required for Distillation"
        ],
    ),
    (
        {"objective.distillation": TEACHER},
        [
            "objective: set only the parameters of the type: dpo for DPO, kto for KTO, orpo for ORPO, simpo for SimPO and rewardModel for RewardModel; distillation is required for Distillation"
        ],
    ),
    (
        {"objective.type": "DPO"},
        [
            "data.columns.type: objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
        ],
    ),
    (
        {"data.columns": PREFERENCES},
        [
            (
                "data.columns.type: objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
            )
        ],
    ),
    (
        {"objective.type": "RewardModel", "data.columns": PREFERENCES, "training.monitor": "Accuracy"},
        [],
    ),
    (
        {"training.monitor": "Accuracy"},
        [
            "training.monitor Accuracy requires objective.type DPO, ORPO, SimPO or RewardModel",
        ],
    ),
    (
        {"objective.type": "DPO", "data.columns": {**PREFERENCES, "margin": "gap"}},
        ["data.columns.margin requires objective.type RewardModel"],
    ),
    (
        {"objective.type": "ORPO"},
        [
            "data.columns.type: objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
        ],
    ),
    (
        {"objective.type": "ORPO", "data.columns": UNPAIRED},
        [
            "data.columns.type: objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse",
            (
                "data.columns.type: objective.type KTO requires data.columns.type Unpaired, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
            ),
        ],
    ),
    (
        {"objective.type": "KTO"},
        [
            "data.columns.type: objective.type KTO requires data.columns.type Unpaired, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
        ],
    ),
    (
        {"objective.type": "DPO", "data.columns": UNPAIRED},
        [
            "data.columns.type: objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse",
            (
                "data.columns.type: objective.type KTO requires data.columns.type Unpaired, which no other objective allows: for SFT and Distillation use Text, Messages or PromptResponse"
            ),
        ],
    ),
    (
        {"data.columns": {"type": "Text"}, "objective.lossOn": "Answer"},
        [
            "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without data.prepare.promptTemplate, or data.prepare.responseTemplate"
        ],
    ),
    (
        {"data.columns": {"type": "Text", "messageWeight": "train"}},
        ["data.columns: messageWeight, messages and tools can be set only when type is Messages"],
    ),
    (
        {"data.columns": {"type": "Messages", "messageWeight": "train"}, "objective.lossOn": "All"},
        [
            "objective.lossOn must not be All when data.columns.messageWeight is set, or when data.source.type is InferenceTable, whose earlier answers have no feedback"
        ],
    ),
    (
        {"training.epochs": 1, "training.maxSteps": 2},
        [
            "training: must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio"
        ],
    ),
    (
        {"training.warmupSteps": 1, "training.warmupRatio": 0.1},
        [
            "training: must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio"
        ],
    ),
    (
        {"training.scheduler": "WSD", "training.decaySteps": 2, "training.decayRatio": 0.1},
        [
            "training: must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio"
        ],
    ),
    (
        {"training.decaySteps": 2},
        ["training.scheduler: decaySteps and decayRatio can be set only when scheduler is WSD"],
    ),
    (
        {"training.decayRatio": 0.1},
        [("training.scheduler: decaySteps and decayRatio can be set only when scheduler is WSD")],
    ),
    (
        {
            "training.scheduler": "WSD",
            "training.warmupSteps": None,
            "training.decayRatio": 0.4,
            "training.warmupRatio": 0.7,
        },
        ["training.decayRatio: warmupRatio and decayRatio must add up to at most 1: lower one of them"],
    ),
    (
        {
            "training.scheduler": "WSD",
            "training.decaySteps": 10,
            "training.warmupSteps": 3,
            "training.maxSteps": 12,
        },
        [
            "training.decaySteps: warm-up and decay must not be longer than maxSteps: lower decaySteps or warmupSteps"
        ],
    ),
    (
        {"training.minLearningRate": 1e-06, "training.scheduler": "Constant"},
        [
            (
                "training.minLearningRate: minLearningRate must be below learningRate, and requires scheduler Linear, Cosine or WSD"
            )
        ],
    ),
    (
        {"training.scheduler": "WSD", "training.minLearningRate": 1e-05, "training.learningRate": 1e-05},
        [
            "training.minLearningRate: minLearningRate must be below learningRate, and requires scheduler Linear, Cosine or WSD"
        ],
    ),
    (
        {"training.earlyStopping": {}},
        [
            "training.evalEverySteps: earlyStopping and select Best require evaluations during training: set training.evalEverySteps"
        ],
    ),
    (
        {"training.select": "Best"},
        [
            "training.evalEverySteps: earlyStopping and select Best require evaluations during training: set training.evalEverySteps"
        ],
    ),
    (
        {"model.adapter": "Continue", "method": {"type": "Full"}},
        [
            "model.adapter Continue requires method.type LoRA, QLoRA or DoRA, without method.lora: the adapter keeps its rank, scale and layers"
        ],
    ),
    (
        {"model.adapter": "Continue", "method": {"type": "LoRA", "lora": {"rank": 8}}},
        [
            (
                "model.adapter Continue requires method.type LoRA, QLoRA or DoRA, without method.lora: the adapter keeps its rank, scale and layers"
            )
        ],
    ),
    (
        {"model.adapter": "Continue", "method": {"type": "LoRA", "lora": {"init": "PiSSA"}}},
        [
            (
                "model.adapter Continue requires method.type LoRA, QLoRA or DoRA, without method.lora: the adapter keeps its rank, scale and layers"
            )
        ],
    ),
    (
        {"method": {"type": "LoRA", "lora": {"targetModules": ["q_proj"], "modulesToSave": ["q_proj"]}}},
        ["method.lora.modulesToSave: modulesToSave and targetModules must not name the same layer"],
    ),
    (
        {"method": {"type": "QLoRA", "lora": {"init": "PiSSA"}}},
        [
            (
                "method.lora.init: lora.init PiSSA requires type LoRA: it changes the frozen weights, which QLoRA quantizes"
                " and DoRA normalizes"
            )
        ],
    ),
    (
        {"method": {"type": "DoRA", "lora": {"init": "PiSSA"}}},
        [
            (
                "method.lora.init: lora.init PiSSA requires type LoRA: it changes the frozen weights, which QLoRA quantizes"
                " and DoRA normalizes"
            )
        ],
    ),
    (
        {"method": {"type": "LoRA", "lora": {"init": "PiSSA", "rank": 513}}},
        [
            "method.lora.rank: rank must be at most 512 when init is PiSSA: the registered adapter has twice the rank"
        ],
    ),
    (
        {"model.newTokens": ["<a>"], "model.adapter": "Continue", "method": {"type": "LoRA"}},
        [
            (
                "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation"
            ),
            (
                "model.newTokens: newTokens must not be set when adapter is Continue: the adapter keeps the vocabulary that"
                " it was trained with"
            ),
        ],
    ),
    (
        {"model.newTokens": ["<a>"], "method": {"type": "PromptTuning"}, "training.packing": False},
        [
            "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation"
        ],
    ),
    (
        {
            "model.newTokens": ["<a>"],
            "objective": {"type": "Distillation", "distillation": {"teacher": "/t"}},
        },
        [
            (
                "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation"
            )
        ],
    ),
    (
        {
            "training.optimizer": {"type": "Muon", "weights": "BF16"},
            "method": {"type": "LoRA"},
            "training.precision": "FP16",
        },
        [
            "training.optimizer.type Muon and training.optimizer.weights BF16 require method.type Full",
            "training.optimizer.weights: optimizer.weights BF16 requires precision BF16",
            "training.optimizer.weights: weights BF16 requires type AdamW or AdamW8bit",
        ],
    ),
    (
        {"training.optimizer": {"type": "AdamW8bit", "momentum": 0.9}},
        ["training.optimizer.momentum: momentum can be set only when type is Muon"],
    ),
    (
        {"method.export": "Merged", "training.earlyStopping": {}},
        [
            "method.export: export Merged requires type LoRA, QLoRA or DoRA",
            "training.evalEverySteps: earlyStopping and select Best require evaluations during training: set training.evalEverySteps",
        ],
    ),
]
PREPARATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Hub without a data set": (
        {"source": {"type": "Hub"}},
        [
            (
                "data.source: type Hub requires dataset, and allows config, split and revision; type Mix requires sources; the other types require path, or table instead for Delta, Parquet and InferenceTable"
            )
        ],
    ),
    "Hub in executor pods": (
        {"source": {"type": "Hub", "dataset": "org/set"}, "spark": {"mode": "Kubernetes"}},
        [
            (
                "data.prepare.spark: source.type Hub requires prepare.spark.mode Local, which downloads the data set into "
                "the prep pod"
            )
        ],
    ),
    "path and table": (
        {"source": {"type": "Delta", "path": "/corpus", "table": "a.b"}},
        [
            (
                "data.source: type Hub requires dataset, and allows config, split and revision; type Mix requires sources; the other types require path, or table instead for Delta, Parquet and InferenceTable"
            )
        ],
    ),
    "a mix without sources": (
        {"source": {"type": "Mix"}},
        [
            (
                "data.source: type Hub requires dataset, and allows config, split and revision; type Mix requires sources; the other types require path, or table instead for Delta, Parquet and InferenceTable"
            )
        ],
    ),
    "output over a source of a mix": (
        {
            "source": {"type": "Mix", "sources": [{"name": "a", "type": "CSV", "path": "/corpus"}]},
            "output": "/corpus",
        },
        ["data.prepare.output: prepare.output must not be the path of a source: set another folder"],
    ),
    "near dedupe": (
        {"dedupe": {"exact": False, "near": {}}},
        [
            "data.prepare.dedupe: dedupe.columns and dedupe.near require dedupe.exact true, and must not both be set"
        ],
    ),
    "a template of both answers": (
        {"columns": PREFERRED, "promptTemplate": "{question}", "responseTemplate": "{good}"},
        [
            (
                "data.prepare.responseTemplate: prepare.responseTemplate must not be set when columns.type is Preference or"
                " Unpaired"
            )
        ],
    ),
    "a template of judged answers": (
        {"columns": JUDGED, "promptTemplate": "{question}", "responseTemplate": "{good}"},
        [
            (
                "data.prepare.responseTemplate: prepare.responseTemplate must not be set when columns.type is Preference or"
                " Unpaired"
            )
        ],
    ),
    "template over messages": (
        {"columns": CHAT, "promptTemplate": "{chat}"},
        ["data.prepare.promptTemplate: prepare.promptTemplate must not be set when columns.type is Messages"],
    ),
    "the prompt of a text": (
        {"columns": TEXT, "maxPromptChars": 9},
        [
            (
                "data.prepare: prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is PromptResponse, Preference or Unpaired"
            )
        ],
    ),
    "turns of a text": (
        {"columns": TEXT, "conversation": {}},
        [
            (
                "data.prepare: prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is PromptResponse, Preference or Unpaired"
            )
        ],
    ),
    "texts that no chat template renders": (
        {"columns": TEXT, "onTemplateError": "Drop"},
        [
            "data.prepare.onTemplateError: prepare.onTemplateError Drop requires a template that can fail: set "
            "columns.type to Messages, Preference or Unpaired, set prepare.conversation, or set prepare.templateSyntax "
            "to Jinja"
        ],
    ),
    "Jinja without a template": (
        {"templateSyntax": "Jinja"},
        ["data.prepare.promptTemplate: responseTemplate and templateSyntax Jinja require promptTemplate"],
    ),
    "an evaluation set that is a source of the mix": (
        {
            "source": {"type": "Mix", "sources": [{"name": "a", "type": "Delta", "table": "m.s.t"}]},
            "decontaminate": {"sources": [{"name": "b", "type": "Delta", "table": "m.s.t", "version": 3}]},
        },
        [
            "data.prepare.decontaminate: prepare.decontaminate.sources must not include the source: every example would"
            " be dropped"
        ],
    ),
    "response template alone": (
        {"responseTemplate": "{answer}"},
        ["data.prepare.promptTemplate: responseTemplate and templateSyntax Jinja require promptTemplate"],
    ),
    "the answer of a text": (
        {"columns": TEXT, "objective": {"lossOn": "Answer"}},
        [
            "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without data.prepare.promptTemplate, or data.prepare.responseTemplate"
        ],
    ),
    "split": (
        {"splitRatios": {"train": 0.9, "validation": 0.2, "test": 0.0}},
        [
            "data.prepare.splitRatios: train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)"
        ],
    ),
    "output over the source": (
        {"output": "/corpus"},
        ["data.prepare.output: prepare.output must not be the path of a source: set another folder"],
    ),
    "an evaluation set that is the source, and a run that is shorter than short texts": (
        {
            "decontaminate": {
                "sources": [{"name": "a", "type": "Parquet", "path": "/corpus"}],
                "ngram": 6,
                "minWords": 7,
            }
        },
        [
            "data.prepare.decontaminate: prepare.decontaminate.sources must not include the source: every example would"
            " be dropped",
            "data.prepare.decontaminate.minWords: minWords must not be above ngram (default: 13): lower minWords or raise ngram",
        ],
    ),
    "evaluation sets of the Hub in executor pods, and nowhere": (
        {
            "decontaminate": {
                "sources": [{"name": "a", "type": "Hub", "dataset": "o/n"}, {"name": "b", "type": "CSV"}]
            },
            "spark": {"mode": "Kubernetes"},
        },
        [
            (
                "data.prepare.decontaminate: decontaminate.sources of type Hub require spark.mode Local, which downloads "
                "data sets into the prep pod"
            ),
            (
                "data.prepare.decontaminate.sources[1]: type Hub requires dataset, and allows config, split and revision; the other types require path, or table instead for Delta and Parquet"
            ),
        ],
    ),
    "two at once": (
        {"responseTemplate": "{answer}", "dedupe": {"exact": False, "near": {}}},
        [
            "data.prepare.promptTemplate: responseTemplate and templateSyntax Jinja require promptTemplate",
            "data.prepare.dedupe: dedupe.columns and dedupe.near require dedupe.exact true, and must not both be set",
        ],
    ),
}


@pytest.mark.parametrize("changes", ACCEPTED)
def test_a_recipe_that_meets_the_rules_is_accepted(changes: Json) -> None:
    assert spec_rules.find_violations_of_recipe(training_recipe(changes)) == []


@pytest.mark.parametrize(("changes", "sentences"), REFUSED)
def test_a_training_recipe_is_refused_in_the_words_of_the_rules(changes: Json, sentences: list[str]) -> None:
    assert spec_rules.find_violations_of_recipe(training_recipe(changes)) == sentences


@pytest.mark.parametrize(("changes", "sentences"), PREPARATIONS.values(), ids=PREPARATIONS)
def test_a_preparation_is_refused_in_the_words_of_the_rules(changes: Json, sentences: list[str]) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        spec_rules.check(recipe(**changes))
    assert refused.value.message == "; ".join(sentences)


FOUND: dict[str, tuple[Json, Columns, str | None]] = {
    "a text, whose answer nobody knows": (
        {"objective": {"lossOn": "Answer"}},
        Columns(type="Text"),
        "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without data.prepare.promptTemplate, or data.prepare.responseTemplate; the data has "
        "columns of type Text",
    ),
    "turns of a text": (
        {"conversation": {}},
        Columns(type="Text"),
        "data.prepare: prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is PromptResponse, Preference or Unpaired; the data has columns of type Text",
    ),
    "turns of a pair": ({"conversation": {}}, Columns(type="PromptResponse"), None),
    # The API server accepted the job, if by rules of another version.
    "what was wrong before": ({"splitRatios": {"train": 0.5}}, Columns(type="Text"), None),
}


@pytest.mark.parametrize(("changes", "columns", "message"), FOUND.values(), ids=FOUND)
def test_of_columns_that_were_found_only_what_they_violate_counts(
    changes: Json, columns: Columns, message: str | None
) -> None:
    job_recipe = recipe(columns=None, **changes)
    data = job_recipe.data.model_copy(update={"columns": columns})
    complete_recipe = job_recipe.model_copy(update={"data": data})
    if message is None:
        spec_rules.check_columns(job_recipe, complete_recipe)
        return
    with pytest.raises(RecipeRefusedError) as refused:
        spec_rules.check_columns(job_recipe, complete_recipe)
    assert refused.value.message == message


def test_what_the_operator_adds_to_the_recipe_of_a_job_violates_nothing() -> None:
    """The splits of a preparation, and defaults that the schema does not have, such as those of an evaluation."""
    job_recipe = recipe(columns=UNPAIRED).model_dump(mode="json", by_alias=True) | {
        "register": {"model": "tuned"},
        "evaluation": {"command": ["judge"]},
    }
    job_recipe["data"]["splits"] = {"type": "Delta", "path": "/out", "version": 3}
    written = yaml.safe_load(Recipe.model_validate(job_recipe).to_yaml())
    assert written["evaluation"]["baseModel"] is True
    assert spec_rules.find_violations_of_recipe(Recipe.model_validate(written)) == []


def job_samples() -> list[tuple[str, Json]]:
    """The FineTuneJobs of the samples, with their files."""
    return [
        (sample.name, body)
        for sample in sample_files()
        for body in yaml.safe_load_all(sample.read_text(encoding="utf-8"))
        if body["kind"] == FineTuneJob.KIND
    ]


@pytest.mark.parametrize(("sample", "body"), job_samples(), ids=[name for name, _ in job_samples()])
def test_samples_meet_the_rules_and_so_do_their_recipes(sample: str, body: Json) -> None:
    schema = schema_of(FineTuneJob)
    assert [*spec_rules.find_violations(schema, spec_rules.set_defaults(schema, body))] == []
    spec = FineTuneJob.model_validate(body).spec
    if spec.model and spec.data:
        reference = JobReference(name=sample, namespace="team", uid="1")
        assert spec_rules.find_violations_of_recipe(Recipe.of(reference, spec)) == []


def rules_of(schema: Schema) -> list[Schema]:
    """The rules of a schema and of all that is below it."""
    inner = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    below = (rule for part in inner if isinstance(part, dict) for rule in rules_of(part))
    return [*schema.get(VALIDATIONS, []), *below]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_compiles(kind: type[FineTuneJob | ModelPromotion]) -> None:
    expressions = [
        rule[name]
        for rule in rules_of(schema_of(kind))
        for name in ("rule", "messageExpression")
        if name in rule
    ]
    for expression in expressions:
        spec_rules.compile_rule(expression)
    assert len(expressions) > 30


def test_rules_of_changes_are_left_out_and_those_of_creation_are_not() -> None:
    schema = {
        VALIDATIONS: [
            {"rule": "self == oldSelf", "message": "it cannot change"},
            {
                "rule": "oldSelf.hasValue() || (self > 1)",
                "message": "it is too small",
                "optionalOldSelf": True,
            },
        ]
    }
    assert [[*spec_rules.find_violations(schema, value, ".size")] for value in (1, 2)] == [
        ["size: it is too small"],
        [],
    ]


def test_values_have_the_types_and_the_defaults_of_their_schema() -> None:
    schema = {
        "properties": {
            "share": {
                "type": "number",
                VALIDATIONS: [{"rule": "self > 0.5", "message": "it is below a half"}],
            },
            "names": {
                "items": {
                    VALIDATIONS: [
                        {"rule": "self != 'a'", "message": "", "messageExpression": "'not ' + self"}
                    ]
                }
            },
            "part": {"default": {}, "properties": {"inner": {"default": 3}}},
        }
    }
    completed = spec_rules.set_defaults(schema, {"share": 1, "names": ["b", "a"]})
    assert completed == {"share": 1, "names": ["b", "a"], "part": {"inner": 3}}
    assert [*spec_rules.find_violations(schema, completed)] == ["names[1]: not a"]


def test_functions_of_the_api_server_are_there() -> None:
    schema = {VALIDATIONS: [{"rule": "self.isSorted()", "message": "it falls"}]}
    assert [[*spec_rules.find_violations(schema, steps)] for steps in ([], [1, 1, 2], [1, 3, 2])] == [
        [],
        [],
        ["it falls"],
    ]


WORKSPACE: Json = {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}


@pytest.mark.parametrize(
    ("place", "table", "is_refused"),
    [
        ({"spark": WORKSPACE}, "a.b.c", False),
        ({"spark": WORKSPACE}, "b.c", True),
        ({"catalog": HIVE}, "b.c", False),
        ({"catalog": HIVE}, "a.b.c", True),
        ({}, "b.c", False),
        ({}, "a.b.c", False),
    ],
)
def test_tables_of_splits_have_the_levels_of_their_catalog(
    place: Json, table: str, *, is_refused: bool
) -> None:
    tables = {"train": table.replace("c", "d"), "test": table}
    violations = spec_rules.find_violations_of_recipe(recipe(splitTables=tables, **place))
    assert any("splitTables requires" in sentence for sentence in violations) == is_refused
