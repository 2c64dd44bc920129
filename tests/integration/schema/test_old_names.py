"""Old names of fields: the API server refuses each and says the new one, or what the upgrade guide says that it says."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import RENAMED
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from integration.schema import dry_run
from support.api import Api
from support.documents import Page
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
    "clusterId": (
        job(
            data={
                "source": {"type": "Delta", "table": "a.b.c"},
                "prepare": {
                    "spark": {
                        "mode": "Databricks",
                        "databricks": {"volume": "/Volumes/a/b/c", "clusterId": "id"},
                    }
                },
            }
        ),
        "clusterId is now compute",
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
def test_an_old_name_is_refused_with_the_new_one(api: Api, case: str) -> None:
    body, sentence = OLD[case]
    with refused(sentence):
        dry_run.create(api, body)


def test_every_old_name_has_a_case() -> None:
    definitions = [
        definition
        for kind in (FineTuneJob, ModelPromotion)
        for definition in kind.model_json_schema()["$defs"].values()
    ]
    assert {name for found in definitions for name in found.get(RENAMED, {})} == {
        name.removesuffix(" of splits") for name in OLD
    }


def prepared(**prepare: Any) -> Json:
    return job(data={"source": {"type": "Parquet", "path": "/x"}, "prepare": {"output": "/y", **prepare}})


def served(**databricks: Any) -> Json:
    return promotion(serving={"type": "Databricks", "databricks": {"endpoint": "support", **databricks}})


def canary(**step: Any) -> Json:
    return served(canary={"steps": [{"percent": 5, **step}]})


TYPE, OBJECT = "type: Required value", "must be of type object"
# By the column Old of the upgrade guide: objects as people had them, and what the API server says.
AS_WRITTEN: dict[str, tuple[list[Json], str]] = {
    "`data.source: {format: Parquet}`, `data.splits: {format: Delta}`": (
        [
            job(data={"source": {"format": "Parquet", "path": "/x"}}),
            job(data={"splits": {"format": "Delta", "path": "/x"}}),
        ],
        TYPE,
    ),
    "`data.columns: {text: body}`": (
        [job(data={"source": {"type": "Parquet", "path": "/x"}, "columns": {"text": "body"}})],
        TYPE,
    ),
    "`data.prepare.split: {train: 0.9}`": ([prepared(split={"train": 0.9})], "split is now splitRatios"),
    "`data.prepare.spark.driverMemory: 2g`": ([prepared(spark={"driverMemory": "2g"})], "should match"),
    "`data.prepare.spark.databricks.secretRef: name`": (
        [prepared(spark={"mode": "Databricks", "databricks": {"secretRef": "name"}})],
        OBJECT,
    ),
    "`data.prepare.spark.databricks.clusterId: id`": (
        [
            prepared(
                spark={"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c", "clusterId": "id"}}
            )
        ],
        "clusterId is now compute",
    ),
    "`method.merge: true`": ([job(method={"type": "LoRA", "merge": True})], "merge is now export"),
    "`method.lora.useRslora: true`": (
        [job(method={"type": "LoRA", "lora": {"useRslora": True}})],
        "useRslora is now scaling",
    ),
    "`training.batchSize`, `training.evalBatchSize`": (
        [job(training={name: 4}) for name in ("batchSize", "evalBatchSize")],
        "atchSize is now perDevice",
    ),
    "`training.evalSteps`, `training.logSteps`": (
        [job(training={name: 4}) for name in ("evalSteps", "logSteps")],
        "EverySteps",
    ),
    "`training.loadBest: true`": ([job(training={"loadBest": True})], "loadBest is now select"),
    "`checkpoint.asynchronous: false`": (
        [job(checkpoint={"uri": "/c", "asynchronous": False})],
        "asynchronous is now mode",
    ),
    "`trainer.code.configMap: name`": (
        [job(trainer={"command": ["torchrun"], "code": {"configMap": "mine"}})],
        "configMap is now configMapRef",
    ),
    "`model.chatTemplate`, a text": (
        [job(model={"base": "org/base", "chatTemplate": "{{ messages }}"})],
        OBJECT,
    ),
    "`source: {version: 4}`": ([promotion(source={"version": 4})], TYPE),
    "`source: {fineTuneJob: name}`": ([promotion(source={"fineTuneJob": "tune"})], TYPE),
    "`gates: [{name: loss, metric: {...}}]`": (
        [promotion(gates=[{"name": "loss", "metric": {"name": "eval_loss", "max": 2}}])],
        TYPE,
    ),
    "`rollbackTo: 4`, `rollbackTo: Previous`": (
        [promotion(rollbackTo=4), promotion(rollbackTo="Previous")],
        OBJECT,
    ),
    "`serving: {databricks: {...}}`": (
        [promotion(serving={"databricks": {"endpoint": "support"}})],
        TYPE,
    ),
    "`canary.steps: [{percent: 5, minutes: 10}]`": ([canary(minutes=10)], "durationSeconds: Required value"),
    "`workloadType: GPU_SMALL`": (
        [served(workloadType="GPU_SMALL")],
        'Unsupported value: "GPU_SMALL"',
    ),
}


@pytest.mark.parametrize("case", AS_WRITTEN)
def test_what_people_had_is_refused_as_the_upgrade_guide_says(api: Api, case: str) -> None:
    bodies, sentence = AS_WRITTEN[case]
    for body in bodies:
        with refused(sentence):
            # As kubectl asks for it: fields that the API server does not know are refused.
            dry_run.create(api, body, strict=True)


def test_the_upgrade_guide_marks_what_is_refused_with_the_new_name() -> None:
    text = Page("docs/operations/upgrade.md").text.partition("## Old names")[2].partition("## Old values")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    marked = {cells[-3]: cells[-1] == "**the new name**" for cells in rows}
    del marked["`kubectl get mp`"]
    assert marked == {
        case: " is now " in sentence or sentence == "EverySteps" for case, (_, sentence) in AS_WRITTEN.items()
    }
