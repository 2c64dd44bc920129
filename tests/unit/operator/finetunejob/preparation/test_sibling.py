"""The trials of a sweep share what one of them has prepared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob
from finetune_operator.finetunejob.preparation import sibling
from finetune_operator.owners import Owner
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    SOURCE,
    applied,
    conclude,
    ftj,
    later,
    observed,
    said,
    stamped,
    status,
)

Json = dict[str, Any]
SWEEP = Owner("team", "uid-of-the-sweep")
DATA: Json = {
    "rows": {"train": 90, "validation": 5, "test": 5},
    "path": "s3://lake/splits",
    "version": 7,
    "digest": "c0ffee",
}
MESSAGE = "s3://lake/splits version 7: 90 train, 5 validation, 5 test rows"
SPEC: Json = {
    "data": {"source": {"type": "Parquet", "path": "s3://lake/corpus"}, "prepare": {"maxTokens": 256}},
    "model": {"base": "org/model"},
    "objective": {"type": "SFT"},
    "training": {"learningRate": 1e-4},
}
OWN_TABLE = SPEC | {"data": {"prepare": {"reuse": "Never"}}}


def trial(**spark: Any) -> FineTuneJob:
    """A trial of the sweep that is about to prepare."""
    prepare = SOURCE["prepare"] | {"output": "s3://lake/splits"} | ({"spark": spark} if spark else {})
    data = SOURCE | {"source": SOURCE["source"] | {"path": "s3://lake/corpus"}, "prepare": prepare}
    return dataclasses.replace(ftj(status(ACCEPTED, ADMITTED), data=data), sweep=SWEEP)


def other(
    number: int,
    value: str = "True",
    *,
    at: float = 0,
    reason: ConditionReason = ConditionReason.PREPARED,
    spec: Json | None = None,
    **data: Any,
) -> Json:
    """Another trial of the sweep, with its condition Prepared."""
    prepared = {
        "type": ConditionType.PREPARED,
        "status": value,
        "reason": reason,
        "message": MESSAGE,
        "lastTransitionTime": stamped(at),
    }
    return {
        "metadata": {"name": f"sweep-{number}", "namespace": "team"},
        "spec": SPEC | (spec or {}),
        "status": {"conditions": [prepared], **({"data": DATA | data} if value == "True" else {})},
    }


def without_table(trial: Json) -> Json:
    return trial | {"status": {"conditions": trial["status"]["conditions"]}}


# This trial; the other ones; the name of the one whose table it uses.
TRIALS: dict[str, tuple[Json, list[Json], str | None]] = {
    "the first": (SPEC, [], None),
    "one that prepares": (SPEC, [other(1, "False", reason=ConditionReason.PREPARING)], None),
    "one that has prepared": (SPEC, [other(1)], "sweep-1"),
    "one with other hyperparameters": (SPEC, [other(1, spec={"training": {"learningRate": 1e-3}})], "sweep-1"),
    # NB: the second one may have rows that are newer, because somebody deleted the table, for example.
    "two that have prepared": (SPEC, [other(1, at=60), other(2, at=5, version=8)], "sweep-2"),
    "one without a table": (SPEC, [without_table(other(1))], None),
    "another objective": (SPEC, [other(1, spec={"objective": {"type": "SFT", "lossOn": "All"}})], None),
    "another model": (SPEC, [other(1, spec={"model": {"base": "org/other"}})], None),
    "a table for each": (OWN_TABLE, [other(1, spec=OWN_TABLE)], None),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "others", "expected"), TRIALS.values(), ids=TRIALS)
def test_which_trial_has_prepared_the_same_data(spec: Json, others: list[Json], expected: str | None) -> None:
    prepared_trial = sibling.find_prepared_trial({"spec": spec}, others)
    assert (prepared_trial and prepared_trial["metadata"]["name"]) == expected


# Another trial that has prepared; the reason of Prepared, and who wrote the table.
PREPARED: dict[str, tuple[Json, ConditionReason, str]] = {
    "it wrote the table": (other(1), ConditionReason.PREPARED, "sweep-1"),
    "with a warning": (
        other(1, reason=ConditionReason.PREPARED_WITH_WARNING),
        ConditionReason.PREPARED_WITH_WARNING,
        "sweep-1",
    ),
    "an earlier job wrote the table": (other(1, writtenBy="earlier"), ConditionReason.PREPARED, "earlier"),
}


@pytest.mark.parametrize(("prepared", "reason", "writer"), PREPARED.values(), ids=PREPARED)
def test_a_trial_uses_the_table(prepared: Json, reason: ConditionReason, writer: str) -> None:
    decision = conclude(trial(), observed(prepared_trial=prepared), at=later(10))
    message = f"trial sweep-1 of the same sweep has prepared the data: {MESSAGE}"
    assert said(decision, ConditionType.PREPARED) == ("True", reason, message)
    assert decision.status.data == DataStatus.model_validate(DATA | {"writtenBy": writer})
    assert not [name for name in applied(decision) if name.endswith("-prep")]


def test_without_a_table_a_trial_prepares() -> None:
    decision = conclude(trial(), observed(), at=later(10))
    assert (applied(decision), decision.status.data) == (["ConfigMap/tune-prep", "Job/tune-prep"], None)


MODES: dict[str, Json] = {
    "SparkApplication": {"mode": "SparkApplication"},
    "Databricks": {
        "mode": "Databricks",
        "databricks": {"volume": "/Volumes/a/b/c", "compute": {"type": "Serverless"}},
    },
}


@pytest.mark.parametrize("spark", MODES.values(), ids=MODES)
def test_every_backend(spark: Json) -> None:
    decision = conclude(
        trial(**spark), observed(prepared_trial=other(1), custom_children=CustomChildren()), at=later(10)
    )
    assert decision.status.data == DataStatus.model_validate(DATA | {"writtenBy": "sweep-1"})
    assert (decision.status.databricks_run, decision.status.spark_application) == (None, None)
