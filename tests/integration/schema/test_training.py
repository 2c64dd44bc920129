"""What the API server refuses and accepts of a job's training: methods, objectives, optimizers, schedules."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import DPO, KTO, NO_PACKS, PREFERENCES, UNPAIRED, prepared
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]
OF_ANSWERS_AND_METHODS = "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation"
COLUMNS_OF: Json = {"DPO": PREFERENCES, "KTO": UNPAIRED, "ORPO": PREFERENCES, "RewardModel": PREFERENCES}
DISTILLATION: Json = {"type": "Distillation", "distillation": {"teacher": "/models/teacher"}}


REFUSED: dict[str, tuple[Json, str]] = {
    "unknown method": (job(method={"type": "Magic"}), 'spec.method.type: Unsupported value: "Magic"'),
    "epochs and maxSteps": (
        job(training={"epochs": 1, "maxSteps": 10}),
        "must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio",
    ),
    "no answer to take the loss on": (
        job(data=prepared(promptTemplate="{text}"), objective={"lossOn": "Answer"}),
        (
            "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without data.prepare.promptTemplate, or data.prepare.responseTemplate"
        ),
    ),
    "lora without LoRA": (
        job(method={"lora": {"rank": 8}}),
        "set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning",
    ),
    "packing with virtual tokens": (
        job(method={"type": "PromptTuning"}),
        "method.type PrefixTuning and PromptTuning require training.packing false",
    ),
    "activation checkpointing with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"activationCheckpointing": "Auto"}),
        "method.type PrefixTuning and PromptTuning require training.packing false",
    ),
    "compiled layers with virtual tokens": (
        job(method={"type": "PrefixTuning"}, training=NO_PACKS | {"compile": True}),
        "method.type PrefixTuning and PromptTuning require training.packing false",
    ),
    "a prefix that starts from a text": (
        job(method={"type": "PrefixTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS),
        "softPrompt.initText can be set only when type is PromptTuning",
    ),
    "a soft prompt for LoRA": (
        job(method={"type": "LoRA", "softPrompt": {"virtualTokens": 8}}),
        "set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning",
    ),
    "quantization without QLoRA": (
        job(method={"type": "LoRA", "quantization": {"type": "NF4"}}),
        "set only the parameters of the type: lora for LoRA, QLoRA and DoRA, quantization for QLoRA, softPrompt for PrefixTuning and PromptTuning",
    ),
    "merging a soft prompt": (
        job(method={"type": "PromptTuning", "export": "Merged"}, training=NO_PACKS),
        "export Merged requires type LoRA, QLoRA or DoRA",
    ),
    **{
        f"{objective['type']} with {method}": (
            job(
                method={"type": method},
                objective=objective,
                training=NO_PACKS,
                data=prepared(columns=COLUMNS_OF[objective["type"]])
                if objective["type"] in COLUMNS_OF
                else prepared(),
            ),
            sentence,
        )
        for objective, methods, sentence in (
            (DPO, ("PrefixTuning", "PromptTuning"), OF_ANSWERS_AND_METHODS),
            (KTO, ("PrefixTuning",), OF_ANSWERS_AND_METHODS),
            ({"type": "ORPO"}, ("PromptTuning",), OF_ANSWERS_AND_METHODS),
            ({"type": "RewardModel"}, ("PrefixTuning",), OF_ANSWERS_AND_METHODS),
            (
                DISTILLATION,
                ("QLoRA", "PrefixTuning", "PromptTuning"),
                "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with objective.type Distillation",
            ),
        )
        for method in methods
    },
    "DPO without preferences": (
        job(objective=DPO),
        "objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference",
    ),
    "SimPO of judged answers": (
        job(data=prepared(columns=UNPAIRED), objective={"type": "SimPO"}),
        "objective.type DPO, ORPO, SimPO or RewardModel requires data.columns.type Preference",
    ),
    "the parameters of another objective": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"orpo": {}}),
        "orpo for ORPO",
    ),
    "smoothed IPO": (
        job(
            data=prepared(columns=PREFERENCES),
            objective=DPO | {"dpo": {"loss": "IPO", "labelSmoothing": 0.1}},
        ),
        "labelSmoothing must be 0 unless loss is Sigmoid",
    ),
    "noise on virtual tokens": (
        job(method={"type": "PromptTuning"}, training={"packing": False, "neftuneAlpha": 5}),
        "training.activationCheckpointing None and no training.neftuneAlpha",
    ),
    "preferences without DPO": (
        job(data=prepared(columns=PREFERENCES)),
        "data.columns.type Preference, which no other objective allows: for SFT and Distillation use Text",
    ),
    "KTO without labels": (
        job(data=prepared(columns=PREFERENCES), objective=KTO),
        "objective.type KTO requires data.columns.type Unpaired",
    ),
    "labels without KTO": (
        job(data=prepared(columns=UNPAIRED)),
        "data.columns.type Unpaired, which no other objective allows: for SFT and Distillation use Text",
    ),
    "parameters of reward models without one": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"rewardModel": {}}),
        "rewardModel for RewardModel",
    ),
    "a margin without a reward model": (
        job(data=prepared(columns=PREFERENCES | {"margin": "gap"}), objective=DPO),
        "data.columns.margin requires objective.type RewardModel",
    ),
    "a margin of an answer": (
        job(data=prepared(columns=UNPAIRED | {"margin": "gap"}), objective=KTO),
        "margin can be set only when type is Preference",
    ),
    "accuracy without pairs": (
        job(training={"monitor": "Accuracy"}),
        "training.monitor Accuracy requires objective.type DPO, ORPO, SimPO or RewardModel",
    ),
    "parameters of KTO without KTO": (
        job(objective={"kto": {"beta": 0.2}}),
        "kto for KTO",
    ),
    "a label of pairs": (
        job(data=prepared(columns=PREFERENCES | {"label": "l"}), objective=DPO),
        "label can be set only when type is Unpaired",
    ),
    "a template of judged answers": (
        job(data=prepared(columns=UNPAIRED, promptTemplate="{p}", responseTemplate="{c}"), objective=KTO),
        "prepare.responseTemplate must not be set when columns.type is Preference or Unpaired",
    ),
    "a teacher without Distillation": (
        job(objective={"distillation": {"teacher": "/t"}}),
        "distillation is required for Distillation",
    ),
    "no teacher": (
        job(objective={"type": "Distillation"}),
        "distillation is required for Distillation",
    ),
    "a loss on the answer for DPO": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"lossOn": "All"}),
        "lossOn and labelSmoothing can be set only when type is SFT",
    ),
    "a loss on the answer of a text": (
        job(data=prepared(), objective={"lossOn": "Answer"}),
        "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages",
    ),
    "a loss on the last answer of a text": (
        job(data=prepared(), objective={"lossOn": "LastAnswer"}),
        "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages",
    ),
    "weights of messages beside a loss on all tokens": (
        job(
            data=prepared(columns={"type": "Messages", "messageWeight": "train"}), objective={"lossOn": "All"}
        ),
        "objective.lossOn must not be All when data.columns.messageWeight is set",
    ),
    "a template of both answers": (
        job(
            data=prepared(columns=PREFERENCES, promptTemplate="{p}", responseTemplate="{c}"),
            objective=DPO,
        ),
        "prepare.responseTemplate must not be set when columns.type is Preference or Unpaired",
    ),
    "an adapter that goes on as a model": (
        job(model={"base": "models:/m@a", "adapter": "Continue"}),
        "model.adapter Continue requires method.type LoRA, QLoRA or DoRA",
    ),
    "an adapter that goes on with other layers": (
        job(
            model={"base": "models:/m@a", "adapter": "Continue"}, method={"type": "LoRA", "lora": {"rank": 8}}
        ),
        "model.adapter Continue requires method.type LoRA, QLoRA or DoRA, without method.lora: the adapter keeps its rank, scale and layers",
    ),
    **{
        f"PiSSA with {method}": (
            job(method={"type": method, "lora": {"init": "PiSSA"}}),
            (
                "lora.init PiSSA requires type LoRA: it changes the frozen weights, which QLoRA quantizes and DoRA "
                "normalizes"
            ),
        )
        for method in ("QLoRA", "DoRA")
    },
    "PiSSA of a rank whose double no adapter may have": (
        job(method={"type": "LoRA", "lora": {"init": "PiSSA", "rank": 513}}),
        "rank must be at most 512 when init is PiSSA: the registered adapter has twice the rank",
    ),
    "a layer that is adapted and trained whole": (
        job(method={"type": "LoRA", "lora": {"targetModules": ["lm_head"], "modulesToSave": ["lm_head"]}}),
        "modulesToSave and targetModules must not name the same layer",
    ),
    "new tokens in an adapter that goes on": (
        job(
            model={"base": "models:/m@a", "adapter": "Continue", "newTokens": ["<a>"]},
            method={"type": "LoRA"},
        ),
        "newTokens must not be set when adapter is Continue: the adapter keeps the vocabulary that it was trained with",
    ),
    "new tokens in an adapter alone": (
        job(model={"base": "org/base", "newTokens": ["<a>"]}, method={"type": "LoRA"}),
        (
            "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation"
        ),
    ),
    "new tokens under virtual ones": (
        job(
            model={"base": "org/base", "newTokens": ["<a>"]},
            method={"type": "PromptTuning"},
            training={"packing": False},
        ),
        "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation",
    ),
    "new tokens that a teacher does not have": (
        job(model={"base": "org/base", "newTokens": ["<a>"]}, objective=DISTILLATION),
        (
            "model.newTokens requires method.type Full, or LoRA, QLoRA or DoRA with method.export Merged, and an objective.type other than Distillation"
        ),
    ),
    "the best of no evaluations": (
        job(training={"select": "Best"}),
        "earlyStopping and select Best require evaluations during training: set training.evalEverySteps",
    ),
    **{
        f"a schedule with {what}": (job(training=training), sentence)
        for what, training, sentence in (
            (
                "two lengths of its decay",
                {"scheduler": "WSD", "decaySteps": 9, "decayRatio": 0.1},
                "must not both be set: epochs and maxSteps, warmupSteps and warmupRatio, or decaySteps and decayRatio",
            ),
            (
                "steps of no decay",
                {"scheduler": "Linear", "decaySteps": 9},
                "decaySteps and decayRatio can be set only when scheduler is WSD",
            ),
            (
                "a share of no decay",
                {"decayRatio": 0.1},
                ("decaySteps and decayRatio can be set only when scheduler is WSD"),
            ),
            (
                "shares above 1",
                {"scheduler": "WSD", "warmupRatio": 0.6, "decayRatio": 0.5},
                "warmupRatio and decayRatio must add up to at most 1: lower one of them",
            ),
            (
                "more steps than the run",
                {"scheduler": "WSD", "warmupSteps": 2, "decaySteps": 9, "maxSteps": 10},
                "warm-up and decay must not be longer than maxSteps: lower decaySteps or warmupSteps",
            ),
            (
                "a floor of nothing that decreases",
                {"scheduler": "Constant", "minLearningRate": 0},
                "minLearningRate must be below learningRate, and requires scheduler Linear, Cosine or WSD",
            ),
            (
                "a floor at its peak",
                {"learningRate": 1e-4, "minLearningRate": 1e-4},
                "minLearningRate must be below learningRate, and requires scheduler Linear, Cosine or WSD",
            ),
        )
    },
    **{
        f"{name} {value} of the optimizer": (
            job(training={"optimizer": {name: value}}),
            f"spec.training.optimizer.{name}",
        )
        for name, value in (("beta1", 1), ("beta2", -0.1), ("epsilon", 0))
    },
    "momentum of AdamW": (
        job(training={"optimizer": {"momentum": 0.9}}),
        "momentum can be set only when type is Muon",
    ),
    "Muon for bf16 weights": (
        job(training={"optimizer": {"type": "Muon", "weights": "BF16"}}),
        "weights BF16 requires type AdamW or AdamW8bit",
    ),
    "bf16 weights that compute in fp32": (
        job(training={"precision": "FP32", "optimizer": {"weights": "BF16"}}),
        "optimizer.weights BF16 requires precision BF16",
    ),
    "bf16 weights of an adapter": (
        job(method={"type": "LoRA"}, training={"optimizer": {"weights": "BF16"}}),
        "training.optimizer.type Muon and training.optimizer.weights BF16 require method.type Full",
    ),
    "Muon for an adapter": (
        job(method={"type": "LoRA"}, training={"optimizer": {"type": "Muon"}}),
        "training.optimizer.type Muon and training.optimizer.weights BF16 require method.type Full",
    ),
    "label smoothing of targets for DPO": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"labelSmoothing": 0.1}),
        "labelSmoothing can be set only when type is SFT: for DPO, set dpo.labelSmoothing",
    ),
    "half of the pairs the wrong way round": (
        job(data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"labelSmoothing": 0.5}}),
        "spec.objective.dpo.labelSmoothing",
    ),
    "a folder in the name of a model": (
        job(register={"model": "team/support"}),
        "MLflow does not allow slashes, colons or leading dots in the name of a model: remove them",
    ),
    "a name of a model that is too long": (
        job(register={"model": "m" * 257}),
        (
            "MLflow allows at most 256 characters in the name of a model, and Unity Catalog 255 in each of the three parts:"
            " shorten the name"
        ),
    ),
    "a sign in the key of a tag of the version": (
        job(register={"tags": {"a$": "b"}}),
        (
            "MLflow allows up to 250 letters, digits, spaces and _ / . : - in the key of a tag, and no relative path: rename the tag"
        ),
    ),
    "a sign in the key of a tag of the run": (
        job(tracking={"tags": {"who?": "me"}}),
        (
            "MLflow allows up to 250 letters, digits, spaces and _ / . : - in the key of a tag, and no relative path: rename the tag"
        ),
    ),
    "stopping early without evaluations": (
        job(training={"earlyStopping": {}}),
        "earlyStopping and select Best require evaluations during training: set training.evalEverySteps",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
    "a long name in Unity Catalog": job(register={"model": f"{'c' * 120}.{'s' * 120}.{'m' * 120}"}),
    **{method: job(method={"type": method}) for method in ("Full", "LoRA", "QLoRA", "DoRA")},
    **{
        method: job(method={"type": method, "softPrompt": {"virtualTokens": 8}}, training=NO_PACKS)
        for method in ("PrefixTuning", "PromptTuning")
    },
    "a prompt that starts from a text": job(
        method={"type": "PromptTuning", "softPrompt": {"initText": "Answer:"}}, training=NO_PACKS
    ),
    "DPO": job(data=prepared(columns=PREFERENCES, promptTemplate="Q: {p}"), objective=DPO),
    "IPO": job(data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"loss": "IPO"}}),
    "ORPO, with noise": job(
        data=prepared(columns=PREFERENCES), objective={"type": "ORPO"}, training={"neftuneAlpha": 5}
    ),
    "SimPO": job(data=prepared(columns=PREFERENCES), objective={"type": "SimPO", "simpo": {"gamma": 0}}),
    "RewardModel": job(
        data=prepared(columns=PREFERENCES | {"margin": "gap"}),
        objective={"type": "RewardModel", "rewardModel": {"centerRewardsCoefficient": 0.01}},
        method={"type": "QLoRA"},
        training={"evalEverySteps": 10, "select": "Best", "monitor": "Accuracy"},
        evaluation={"metrics": ["Loss", "Accuracy"], "generations": 0},
        register={"model": "rewards"},
    ),
    "KTO": job(
        data=prepared(columns=UNPAIRED, promptTemplate="Q: {prompt}", minPromptChars=2, conversation={}),
        objective=KTO | {"kto": {"beta": 0.2, "desirableWeight": 1.3}},
        method={"type": "QLoRA"},
    ),
    "an answer in columns that are found": job(
        data={"splits": {"type": "Delta", "path": "/x"}}, objective={"lossOn": "Answer"}
    ),
    "DPO with QLoRA": job(
        data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"beta": 0.2}}, method={"type": "QLoRA"}
    ),
    "Distillation with DoRA": job(objective=DISTILLATION, method={"type": "DoRA"}),
    "the answer of a templated text": job(
        data=prepared(promptTemplate="{title}", responseTemplate="{text}"), objective={"lossOn": "Answer"}
    ),
    "an adapter that goes on": job(
        model={"base": "models:/m@a", "adapter": "Continue"}, method={"type": "DoRA"}
    ),
    "new tokens": job(model={"base": "org/base", "newTokens": ["<a>", "</a>"]}),
    "new tokens in a merged adapter, with layers of its own": job(
        model={"base": "org/base", "newTokens": ["<a>"]},
        method={"type": "QLoRA", "export": "Merged", "lora": {"bias": "All", "modulesToSave": ["lm_head"]}},
    ),
    "the best of some": job(
        training={"select": "Best", "evalEverySteps": 5, "earlyStopping": {"patience": 2}}
    ),
    "a schedule in all its parts": job(
        training={
            "scheduler": "WSD",
            "warmupSteps": 2,
            "decaySteps": 8,
            "maxSteps": 10,
            "learningRate": 1e-4,
            "minLearningRate": 1e-5,
            "optimizer": {"beta1": 0, "beta2": 0.95, "epsilon": 1e-6},
        },
        objective={"labelSmoothing": 0.1},
    ),
    "8 bits and bf16 weights": job(
        training={"optimizer": {"type": "AdamW8bit", "weights": "BF16", "beta2": 0.95}, "precision": "BF16"}
    ),
    "8 bits for an adapter": job(
        method={"type": "QLoRA"}, training={"optimizer": {"type": "AdamW8bit"}, "precision": "FP16"}
    ),
    "Muon": job(training={"optimizer": {"type": "Muon", "momentum": 0.9}, "precision": "FP16"}),
    "shares of a schedule": job(
        training={"scheduler": "WSD", "warmupRatio": 0.7, "decayRatio": 0.3, "minLearningRate": 1}
    ),
    "label smoothing of pairs": job(
        data=prepared(columns=PREFERENCES), objective=DPO | {"dpo": {"labelSmoothing": 0.1}}
    ),
    "all of the speed": job(
        training={"compile": True, "activationCheckpointing": "Auto"},
        distributed={"strategy": "HSDP", "nodes": 2, "processesPerNode": 2},
        tracking={"systemMetrics": True},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])
