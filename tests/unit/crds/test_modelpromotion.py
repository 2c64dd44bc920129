"""What the models read of a ModelPromotion: versions as numbers or text, defaults, unknown fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_crds import ModelPromotion, ModelPromotionSpec, ModelPromotionStatus
from finetune_crds.gates import Gate

Json = dict[str, Any]
LEAST: Json = {
    "model": "docstring-llama",
    "alias": "champion",
    "source": {"type": "Alias", "alias": "staging"},
}


def spec(**fields: Any) -> ModelPromotionSpec:
    """The least spec, with fields replaced."""
    return ModelPromotionSpec.model_validate(LEAST | fields)


def test_what_is_not_said_has_its_default() -> None:
    assert spec().model_dump(mode="json") == {
        "model": "docstring-llama",
        "alias": "champion",
        "source": {
            "type": "Alias",
            "version": None,
            "alias": "staging",
            "fineTuneJobRef": None,
            "registry": None,
        },
        "gates": [],
        "approval": None,
        "approvals": [],
        "soakSeconds": 0,
        "windows": [],
        "onDrift": "Repair",
        "onRegression": None,
        "onDelete": "KeepAlias",
        "rollbackTo": None,
        "suspend": False,
        "tags": {},
        "tracking": {"uri": None, "registryUri": None, "secretRef": None},
        "serving": None,
    }


VERSIONS: dict[str, tuple[object, str]] = {
    "a number": (7, "7"),
    "text": ("7", "7"),
    "a long number": (1_234_567_890, "1234567890"),
}


@pytest.mark.parametrize(("written", "read"), VERSIONS.values(), ids=VERSIONS)
def test_a_version_is_text_however_it_is_written(written: object, read: str) -> None:
    named = {"type": "Version", "version": written}
    found = spec(source=named, approvals=[{"version": written, "by": "kim"}], rollbackTo=named)
    assert found.rollback_to
    versions = (found.source.version, found.approvals[0].version, found.rollback_to.version)
    assert versions == (read, read, read)


NO_VERSIONS: dict[str, object] = {
    "nothing": "",
    "zero": 0,
    "negative": -1,
    "a leading zero": "07",
    "a fraction": 1.5,
    "an alias": "champion",
    "a truth": True,
    "too long": "12345678901",
}


@pytest.mark.parametrize("written", NO_VERSIONS.values(), ids=NO_VERSIONS)
def test_what_is_no_version_is_refused(written: object) -> None:
    for field in ("source", "rollbackTo"):
        with pytest.raises(ValidationError):
            spec(**{field: {"type": "Version", "version": written}})


def test_an_approval_without_a_field_is_one() -> None:
    assert spec(approval={}).to_json()["approval"] == {}


def test_a_comparison_names_its_goal() -> None:
    """A default would promote the worse of two accuracies."""
    gate = {
        "name": "better",
        "type": "Comparison",
        "comparison": {"metric": "accuracy", "betterBy": {"absolute": 0.1}},
    }
    with pytest.raises(ValidationError, match="goal"):
        Gate.model_validate(gate)


def test_an_endpoint_has_its_defaults() -> None:
    serving = spec(serving={"type": "Databricks", "endpoint": "support"}).serving
    assert serving is not None
    assert serving.to_json() == {
        "type": "Databricks",
        "endpoint": "support",
        "aliasMoves": "AfterCanary",
        "databricks": {"environment": {}},
    }


def test_a_schema_is_called_schema() -> None:
    table = {"catalog": "ml", "schema": "logs"}
    serving = spec(
        serving={"type": "Databricks", "endpoint": "support", "databricks": {"inferenceTable": table}}
    ).serving
    assert serving is not None
    assert serving.databricks.inference_table is not None
    assert serving.databricks.inference_table.to_json() == table


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert spec(later=1, source={"type": "Alias", "alias": "staging", "later": 1}) == spec()


def test_a_resource_without_a_status_has_an_empty_one() -> None:
    found = ModelPromotion.model_validate({"metadata": {"name": "champion"}, "spec": LEAST})
    assert found.status == ModelPromotionStatus()
    assert found.status.to_json() == {
        "observedGeneration": -1,
        "gateResults": [],
        "history": [],
        "conditions": [],
    }


def test_a_status_is_read_as_it_was_written() -> None:
    move = {
        "fromVersion": "1",
        "toVersion": "2",
        "reason": "Promoted",
        "message": "passed 2 of 2 gates",
        "by": "kim",
        "time": "2026-11-21T12:00:00Z",
        "gates": "0a1b",
    }
    verdict = {
        "name": "loss",
        "verdict": "Failed",
        "value": "5.8",
        "limit": "<= 5.03",
        "holder": "5.03",
        "message": "worse",
    }
    result = {
        "version": "2",
        "digest": "0a1b",
        "job": "champion-gate-0a1b",
        "outcome": "Succeeded",
        "metrics": {"acc": "0.9"},
        "message": "",
        "runId": "r1",
        "time": "2026-11-21T12:00:00Z",
    }
    written = {
        "phase": "Promoted",
        "observedGeneration": 3,
        "current": "2",
        "gates": {"version": "2", "digest": "0a1b", "summary": "0/1", "verdicts": [verdict]},
        "gateResults": [result],
        "history": [move],
        "conditions": [],
    }
    assert ModelPromotionStatus.model_validate(written).to_json() == written


def test_columns_are_those_that_people_were_told() -> None:
    shown = [column["name"] for column in ModelPromotion.COLUMNS if not column.get("priority")]
    assert shown == ["Model", "Alias", "Phase", "Reason", "Current", "Candidate", "Gates", "Age"]
