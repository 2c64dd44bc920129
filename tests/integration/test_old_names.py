"""Old names of fields: the API server refuses each and says the new one."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import RENAMED
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from support.api import Api
from support.refusals import refused
from worlds.processes.jobs import job

Json = dict[str, Any]


def with_source(**source: Any) -> Json:
    """A job whose source has fields of their old names."""
    return job(data={"source": {"type": "Parquet", "path": "/data/corpus", **source}})


def promotion(**spec: Any) -> Json:
    """A ModelPromotion with parts of its spec replaced."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": "champion"},
        "spec": {"alias": "champion", "source": {"type": "Alias", "alias": "staging"}} | spec,
    }


OLD: dict[str, tuple[Json, str]] = {
    "format": (with_source(format="Parquet"), "spec.data.source.format: Invalid value: format is now type"),
    "format of splits": (
        job(data={"splits": {"type": "Delta", "path": "/x", "format": "Delta"}}),
        "spec.data.splits.format: Invalid value: format is now type",
    ),
    "split": (
        job(data={"source": {"type": "Parquet", "path": "/x"}, "prepare": {"split": {"train": 1}}}),
        "split is now splitRatios",
    ),
    "useRslora": (
        job(method={"type": "LoRA", "lora": {"useRslora": True}}),
        "useRslora is now scaling: RankStabilized",
    ),
    "merge": (job(method={"type": "LoRA", "merge": True}), "merge is now export: Merged"),
    "batchSize": (job(training={"batchSize": 4}), "batchSize is now perDeviceBatchSize"),
    "evalBatchSize": (job(training={"evalBatchSize": 4}), "evalBatchSize is now perDeviceEvalBatchSize"),
    "evalSteps": (job(training={"evalSteps": 4}), "evalSteps is now evalEverySteps"),
    "logSteps": (job(training={"logSteps": 4}), "logSteps is now logEverySteps"),
    "loadBest": (job(training={"loadBest": True}), "loadBest is now select: Best"),
    "asynchronous": (
        job(checkpoint={"uri": "/c", "asynchronous": False}),
        "asynchronous is now mode: Async or Sync",
    ),
    "configMap": (
        job(trainer={"command": ["torchrun"], "code": {"configMap": "mine"}}),
        "configMap is now configMapRef: {name: ...}",
    ),
    "fineTuneJob": (
        promotion(source={"type": "FineTuneJob", "fineTuneJob": "tune"}),
        "fineTuneJob is now fineTuneJobRef: {name: ...}",
    ),
    "minutes": (
        promotion(
            serving={
                "type": "Databricks",
                "databricks": {
                    "endpoint": "support",
                    "canary": {"steps": [{"percent": 5, "minutes": 1, "durationSeconds": 60}]},
                },
            }
        ),
        "minutes is now durationSeconds",
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_an_old_name_is_refused_with_the_new_one(api: Api, namespace: str, case: str) -> None:
    body, sentence = OLD[case]
    with refused(sentence):
        api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


def test_every_old_name_has_a_case() -> None:
    definitions = [
        definition
        for kind in (FineTuneJob, ModelPromotion)
        for definition in kind.model_json_schema()["$defs"].values()
    ]
    assert {name for found in definitions for name in found.get(RENAMED, {})} == {
        name.removesuffix(" of splits") for name in OLD
    }
