"""Jobs that the installation does not fit, which wait for it, and jobs that no installation fits, which fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.defaults import Defaults
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    NO_MLFLOW,
    SOURCE,
    conclude,
    ftj,
    observed,
    said,
    tracked,
)

Json = dict[str, Any]
ON_DATABRICKS: Json = {
    "source": {"type": "Delta", "table": "main.llm.chats"},
    "prepare": {
        "spark": {
            "mode": "Databricks",
            "databricks": {"volume": "/Volumes/main/llm/work", "secretRef": {"name": "databricks"}},
        }
    },
}
BUCKET = {"storage": "s3://lake/finetune"}
SERVER, WORKSPACE = Settings(tracking_uri="http://m"), Settings(tracking_uri="databricks")
# The parts; the values of a chart that does not fit them, and of one that does; and a part of what is said with the first.
MISMATCHES: dict[str, tuple[Json, tuple[Json, Settings], tuple[Json, Settings], str]] = {
    "a storage that Databricks cannot write": (
        {"data": ON_DATABRICKS, "model": {"base": "org/model"}},
        ({"storage": "/mnt/shared"}, SERVER),
        (BUCKET, SERVER),
        "is a folder of the pods, which a Databricks run cannot write",
    ),
    "a storage that pods cannot reach": (
        {"data": SOURCE | {"prepare": {}}},
        ({"storage": "/Volumes/main/llm/work"}, SERVER),
        (BUCKET, SERVER),
        "which the training pods cannot read",
    ),
    "a model of one name": (
        {"register": {"model": "support"}},
        ({}, WORKSPACE),
        ({}, SERVER),
        "spec.register.model support must be catalog.schema.name in Unity Catalog",
    ),
    "a model named after the job": (
        {"register": {}},
        ({}, WORKSPACE),
        ({}, SERVER),
        "spec.register.model tune must be catalog.schema.name in Unity Catalog",
    ),
    "an experiment that is no path": (
        {"tracking": {"experiment": "support"}},
        ({}, WORKSPACE),
        ({}, SERVER),
        "spec.tracking.experiment support is not a path",
    ),
    "a base of one name": (
        {"model": {"base": "models:/support@champion"}},
        ({}, WORKSPACE),
        ({}, SERVER),
        "spec.model.base models:/support@champion must be",
    ),
    "a base of a workspace": (
        {"data": ON_DATABRICKS, "model": {"base": "models:/main.llm.support@champion"}},
        (BUCKET, SERVER),
        (BUCKET, WORKSPACE),
        "a Databricks run cannot read the tokenizer",
    ),
    "a registry of a workspace": (
        {"register": {"model": "main.llm.support"}, "tracking": {"registryUri": "databricks-uc"}},
        ({}, SERVER),
        ({}, WORKSPACE),
        "the run would be tracked at http://m and the model registered at databricks-uc",
    ),
    "checkpoints in a workspace": (
        {"checkpoint": {"uri": "/Volumes/main/llm/work"}},
        ({}, SERVER),
        ({}, WORKSPACE),
        "spec.checkpoint.uri /Volumes/main/llm/work is in a Databricks workspace",
    ),
    "a table of another catalog": (
        {"data": {"source": {"type": "Delta", "table": "support.chats"}, "prepare": {"output": "/splits"}}},
        ({"catalog": {"type": "UnityCatalog", "unityCatalog": {"uri": "http://unity:8080"}}}, SERVER),
        ({"catalog": {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}}, SERVER),
        "spec.data.source.table support.chats must be catalog.schema.table",
    ),
}


@pytest.mark.parametrize(("parts", "wrong", "right", "part"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_job_waits_for_the_chart_that_fits_it(
    parts: Json, wrong: tuple[Json, Settings], right: tuple[Json, Settings], part: str
) -> None:
    before: FineTuneJobStatus | None = None
    outcomes = []
    for values, server in (wrong, right):
        settings = dataclasses.replace(server, prep_wheels="/wheels")
        job = ftj(before, defaults=Defaults.model_validate(values), **parts)
        decision = conclude(job, observed(mlflow=tracked()), settings=settings)
        before = decision.status
        outcomes.append(said(decision, ConditionType.ACCEPTED))
        assert said(decision, ConditionType.FAILED) is None
    waiting, accepted = outcomes
    assert waiting
    assert waiting[:2] == ("False", ConditionReason.INSTALLATION_MISMATCH)
    assert part in waiting[2]
    assert accepted == ("True", ConditionReason.ACCEPTED, "the spec can be run")


LASTING: dict[str, Json] = {
    "an output in a workspace": {"data": SOURCE | {"prepare": {"output": "dbfs:/splits"}}},
    "an output of pods on Databricks": {
        "data": ON_DATABRICKS | {"prepare": {**ON_DATABRICKS["prepare"], "output": "/splits"}}
    },
    "checkpoints in DBFS": {"checkpoint": {"uri": "dbfs:/checkpoints"}},
    "a base that no Databricks run reads": {
        "data": ON_DATABRICKS,
        "model": {"base": "models:/support@champion"},
        "tracking": {"uri": "http://m"},
    },
}


@pytest.mark.parametrize("parts", LASTING.values(), ids=LASTING)
@pytest.mark.parametrize("settings", [NO_MLFLOW, SERVER, WORKSPACE], ids=["none", "server", "workspace"])
def test_a_job_fails_for_what_no_chart_would_fit(parts: Json, settings: Settings) -> None:
    decision = conclude(ftj(**parts), observed(mlflow=tracked()), settings=settings)
    failed = said(decision, ConditionType.FAILED)
    assert failed
    assert failed[:2] == ("True", ConditionReason.INVALID_SPEC)
