"""Which recipes carry on a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds import FineTuneJobSpec, JobReference, Recipe, continuation

Json = dict[str, Any]
BODY: Json = {
    "model": {"base": "/models/base"},
    "data": {
        "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
        "splits": {"type": "Delta", "path": "/data/splits", "version": 3},
    },
    "method": {"type": "LoRA", "lora": {"rank": 8, "targetModules": ["q_proj", "v_proj"]}},
    "training": {"perDeviceBatchSize": 4, "gradientAccumulation": 4, "epochs": 1},
    "distributed": {"nodes": 2, "processesPerNode": 2},
    "checkpoint": {"uri": "s3://bucket/checkpoints"},
}


def recipe(changes: Json | None = None, name: str = "tune") -> Recipe:
    """The recipe, with other values at some paths; None removes a field."""
    body: Json = {part: {**value} for part, value in BODY.items()}
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        part = body
        for parent in parents:
            part[parent] = {**part.get(parent, {})}
            part = part[parent]
        part.pop(last, None)
        if value is not None:
            part[last] = value
    return Recipe.of(
        JobReference(name=name, namespace="team", uid=name), FineTuneJobSpec.model_validate(body)
    )


KEPT = continuation.settings(recipe())

CARRIES_ON: dict[str, Json] = {
    "more epochs": {"training.epochs": 3},
    "steps instead of epochs": {"training.epochs": None, "training.maxSteps": 500},
    "one node, more accumulation": {"distributed.nodes": 1, "training.gradientAccumulation": 8},
    "more ranks, fewer sequences each": {
        "distributed": {"nodes": 4, "gpusPerNode": 2}, "training.perDeviceBatchSize": 2,
    },
    "other sharding": {"distributed.strategy": "DDP", "distributed.port": 29400},
    "other timeouts": {"distributed.rendezvousTimeoutSeconds": 9, "distributed.collectiveTimeoutSeconds": 9},
    "other reports": {"training.logEverySteps": 1, "training.evalEverySteps": 5, "training.perDeviceEvalBatchSize": 1},
    "another end": {
        "training.evalEverySteps": 5, "training.earlyStopping": {"patience": 1}, "training.select": "Best",
        "training.maxSkippedSteps": 0,
    },
    "other memory": {"training.activationCheckpointing": "Full", "training.compile": True},
    "other checkpoints": {"checkpoint": {"uri": "/elsewhere", "everySteps": 1, "keep": 9, "mode": "Sync"}},
    "no checkpoints": {"checkpoint": None},
    "an evaluation afterwards": {
        "register": {"model": "m"},
        "evaluation": {"metrics": ["Accuracy"]},
        "pods": {"evaluate": {"image": "other:1", "template": {"spec": {}}}},
    },
    "another run and model": {"tracking": {"runName": "b", "uri": "http://mlflow"}, "register": {"model": "b"}},
    "a merged export": {"method.export": "Merged"},
    "a cache": {"model.cache": {"claimName": "models"}},
    "a default written out": {
        "training.seed": 42, "training.learningRate": 2e-5, "training.optimizer": {"beta1": 0.9}, "objective": {"type": "SFT"},
    },
    "a momentum written out": {"training.optimizer": {"momentum": 0.95}},
    "a zero written out": {"training.minLearningRate": 0, "training.neftuneAlpha": 0, "objective.labelSmoothing": 0},
    "another decay": {"training.decayRatio": 0.2},
    "a set in another order": {"method.lora.targetModules": ["v_proj", "q_proj"]},
    # The digest of the tokens is compared instead.
    "other splits": {"data.splits": {"type": "Delta", "path": "/other", "version": 4}},
    "other rendering": {"model.chatTemplate": {"type": "ChatML"}, "training.truncation": "Fail"},
}  # fmt: skip

REFUSED: dict[str, tuple[Json, list[str]]] = {
    "new tokens": ({"model.newTokens": ["<b>", "<a>"]}, ['model.newTokens [] -> ["<a>", "<b>"]']),
    "layers that are trained whole": (
        {"method.lora.bias": "All", "method.lora.modulesToSave": ["lm_head"]},
        ["method.lora.bias not set -> All", 'method.lora.modulesToSave [] -> ["lm_head"]'],
    ),
    "another beginning": ({"method.lora.init": "PiSSA"}, ["method.lora.init Default -> PiSSA"]),
    "another model": ({"model.base": "/models/other"}, ["model.base /models/base -> /models/other"]),
    "another method": (
        {"method": {"type": "Full"}},
        ["method.lora.rank 8 -> 16", 'method.lora.targetModules ["q_proj", "v_proj"] -> []', "method.type LoRA -> Full"],
    ),
    "another loss": (
        {"objective": {"type": "DPO", "dpo": {"beta": 0.5}}, "data.columns": {"type": "Preference"}},
        ["objective.dpo.beta 0.1 -> 0.5", "objective.type SFT -> DPO"],
    ),
    "another learning rate": ({"training.learningRate": 1e-4}, ["training.learningRate 2e-05 -> 0.0001"]),
    "another schedule": (
        {"training.scheduler": "Constant", "training.warmupSteps": 9},
        ["training.scheduler Cosine -> Constant", "training.warmupSteps not set -> 9"],
    ),
    "another end of the schedule": (
        {"training.scheduler": "WSD", "training.decayRatio": 0.2, "training.minLearningRate": 1e-6},
        [
            "training.minLearningRate not set -> 1e-06", "training.scheduler Cosine -> WSD",
        ],
    ),
    "another optimizer": (
        {"training.optimizer": {"beta2": 0.95}}, ["training.optimizer.beta2 0.999 -> 0.95"],
    ),
    "another objective": (
        {"objective": {"type": "SimPO", "simpo": {"gamma": 1}}, "data.columns": {"type": "Preference"}},
        ["objective.simpo.gamma 0.5 -> 1.0", "objective.type SFT -> SimPO"],
    ),
    "noise": ({"training.neftuneAlpha": 5}, ["training.neftuneAlpha not set -> 5.0"]),
    "another kind of optimizer": (
        {"training.optimizer": {"type": "Muon", "momentum": 0.9}, "training.precision": "FP16"},
        [
            "training.optimizer.momentum not set -> 0.9", "training.optimizer.type AdamW -> Muon",
            "training.precision BF16 -> FP16",
        ],
    ),
    "other weights": ({"training.optimizer": {"weights": "BF16"}}, ["training.optimizer.weights FP32 -> BF16"]),
    "another smoothing": ({"objective.labelSmoothing": 0.1}, ["objective.labelSmoothing not set -> 0.1"]),
    "another order": (
        {"training.seed": 43, "training.packing": False}, ["training.packing true -> false", "training.seed 42 -> 43"],
    ),
    "half the ranks": (
        {"distributed.nodes": 1},
        [
            "sequences per step 64 -> 32 (training.perDeviceBatchSize x gradientAccumulation x ranks; "
            "for 2 ranks, set perDeviceBatchSize to 4 and gradientAccumulation to 8)"
        ],
    ),
    "ranks that do not divide it": (
        {"distributed.nodes": 3},
        [
            "sequences per step 64 -> 96 (training.perDeviceBatchSize x gradientAccumulation x ranks; 64 sequences do not divide evenly "
            "among 6 ranks, so choose a number of ranks that divides 64)"
        ],
    ),
    "a batch that fits none": (
        {"training.perDeviceBatchSize": 3},
        [
            "sequences per step 64 -> 48 (training.perDeviceBatchSize x gradientAccumulation x ranks; "
            "for 4 ranks, set perDeviceBatchSize to 2 and gradientAccumulation to 8)"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes", CARRIES_ON.values(), ids=CARRIES_ON)
def test_a_run_is_carried_on(changes: Json) -> None:
    other = recipe(changes, name="next")
    assert continuation.differences(KEPT, other) == []
    assert continuation.digest(other) == continuation.digest(recipe())


def test_an_alias_of_an_earlier_version_of_the_operator_may_have_meant_any_version() -> None:
    before = continuation.settings(recipe({"model.base": "models:/m@champion"}))
    assert continuation.differences(before, recipe({"model.base": "models:/m/3"})) == []
    told = [
        continuation.differences(before, recipe({"model.base": base}))
        for base in ("models:/n/3", "models:/m@staging")
    ]
    assert told == [
        ["model.base models:/m@champion -> models:/n/3"],
        ["model.base models:/m@champion -> models:/m@staging"],
    ]


@pytest.mark.parametrize(("changes", "told"), REFUSED.values(), ids=REFUSED)
def test_what_keeps_a_recipe_from_it_is_named(changes: Json, told: list[str]) -> None:
    other = recipe(changes)
    assert continuation.differences(KEPT, other) == told
    assert continuation.digest(other) != continuation.digest(recipe())


def test_kto_needs_the_same_sequences_in_a_pass() -> None:
    kto = {"objective": {"type": "KTO"}, "data.columns": {"type": "Unpaired"}}
    kept = continuation.settings(recipe(kto))
    fewer_passes = recipe(kto | {"training.gradientAccumulation": 2, "training.perDeviceBatchSize": 8})
    assert continuation.differences(kept, fewer_passes) == [
        "sequences per forward pass 16 -> 32 (training.perDeviceBatchSize x ranks; KTO estimates a divergence from them)"
    ]
    one_node = {"distributed.nodes": 1, "training.perDeviceBatchSize": 8}
    assert continuation.differences(kept, recipe(kto | one_node)) == []


def test_fields_may_explain_other_examples() -> None:
    other = recipe({"data.splits.version": 4, "model.chatTemplate": {"type": "ChatML"}, "training.seed": 1})
    assert continuation.differences_of_examples(KEPT, other) == [
        "data.splits.version 3 -> 4",
        "model.chatTemplate.type not set -> ChatML",
    ]
    assert continuation.differences_of_examples(KEPT, recipe()) == []


def test_what_a_checkpoint_keeps_is_short_and_no_secret() -> None:
    found = recipe(
        {
            "trainer": {"parameters": {"token": "hush"}},
            "tracking": {"tags": {"a": "hush"}, "secretRef": {"name": "hush"}},
        }
    )
    assert continuation.settings(found) == {
        "data.columns.prompt": "question",
        "data.columns.response": "answer",
        "data.columns.type": "PromptResponse",
        "data.splits.path": "/data/splits",
        "data.splits.type": "Delta",
        "data.splits.version": 3,
        "globalBatch": 64,
        "method.lora.rank": 8,
        "method.lora.targetModules": ["q_proj", "v_proj"],
        "method.type": "LoRA",
        "model.base": "/models/base",
    }


def test_a_long_value_is_cut() -> None:
    (told,) = continuation.differences(KEPT, recipe({"model.base": "/" + "x" * 99}))
    assert told == f"model.base /models/base -> /{'x' * 58}…"


def test_the_digest_survives_versions() -> None:
    # A change here makes attempts compute DPO's reference again.
    assert continuation.digest(recipe()) == "a44f9a2be3f5"
