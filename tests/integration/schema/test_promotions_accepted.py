"""What the API server accepts of a ModelPromotion, its defaults, and what of it can change."""

from __future__ import annotations

from typing import Any

import pytest

from integration.schema import dry_run
from integration.schema.promotions import (
    BETTER,
    LEAST,
    ON_REGRESSION,
    QUERY,
    WINDOW,
    YEAR,
    canary,
    gated,
    promotion,
    served,
)
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]

ACCEPTED: dict[str, Json] = {
    "the least": promotion(),
    "a version as a number": promotion(source={"type": "Version", "version": 3}),
    "a version as text": promotion(source={"type": "Version", "version": "3"}),
    "the largest version": promotion(source={"type": "Version", "version": 9_999_999_999}),
    "a version of another registry": promotion(
        source={"type": "Registry", "registry": {"uri": "http://dev:5000", "model": "m", "version": 3}}
    ),
    "a FineTuneJob": promotion(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "quickstart"}}),
    "an alias that only begins like a version": promotion(alias="v3-champion"),
    "an alias that only begins like latest": promotion(alias="latest-good"),
    "an alias in capitals": promotion(alias="CHAMPION_1"),
    "three names in Unity Catalog": promotion(
        model="ml.prod.support_llama", tracking={"uri": "databricks", "registryUri": "databricks-uc"}
    ),
    "dots in a name of MLflow's": promotion(model="support.llama"),
    "a secret": promotion(tracking={"uri": "https://mlflow.example.com", "secretRef": {"name": "mlflow"}}),
    "every kind of gate": promotion(
        gates=[
            {"name": "least", "type": "Metric", "metric": {"name": "accuracy", "min": 0.9}},
            {"name": "most", "type": "Metric", "metric": {"name": "eval_loss", "max": 3}},
            {"name": "between", "type": "Metric", "metric": {"name": "length", "min": -1, "max": -1}},
            {"name": "tag", "type": "Tag", "tag": {"name": "tested", "equals": ""}},
            {"name": "better", "type": "Comparison", "comparison": BETTER},
            {"name": "tests", "type": "Job", "job": {"image": "tests:1", "retries": 0, "timeoutSeconds": 1}},
            {"name": "measured", "type": "Metric", "metric": {"name": "acc", "min": 0, "job": "tests"}},
            {"name": "compared", "type": "Comparison", "comparison": {**BETTER, "job": "tests"}},
            {
                "name": "not-worse",
                "type": "Comparison",
                "comparison": {
                    "metric": "accuracy",
                    "goal": "Maximize",
                    "notWorseThan": {"absolute": 0},
                },
            },
            {
                "name": "all-of-it",
                "type": "Comparison",
                "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"relative": 1}},
            },
        ]
    ),
    "approvals": promotion(
        approval={"bypassSoak": True, "timeoutSeconds": YEAR},
        approvals=[{"version": 3, "by": "kim"}, {"version": "3", "by": "lee"}],
    ),
    "an approval that is still to come": promotion(approval={}),
    "a soak of a year": promotion(soakSeconds=YEAR),
    **{f"onDrift {answer}": promotion(onDrift=answer) for answer in ("Repair", "Warn", "Adopt")},
    **{f"onDelete {end}": promotion(onDelete=end) for end in ("KeepAlias", "RemoveAlias")},
    "back to the version before": promotion(rollbackTo={"type": "Previous"}),
    "back to a number": promotion(rollbackTo={"type": "Version", "version": 2}),
    "the model of its own name": promotion(model=None),
    "back to text": promotion(rollbackTo={"type": "Version", "version": "2"}),
    "suspended": promotion(suspend=True),
    "windows": promotion(
        windows=[WINDOW, WINDOW | {"name": "b", "schedule": "@daily", "timeZone": "Asia/Tokyo"}]
    ),
    "a number after a move": promotion(onRegression=ON_REGRESSION),
    "a metric of the endpoint after a move": promotion(
        onRegression={name: value for name, value in ON_REGRESSION.items() if name != "prometheus"}
        | {"endpointMetric": "latency_ms"},
        serving={"type": "Databricks", "endpoint": "support"},
    ),
    "a number with all fields": promotion(
        onRegression=ON_REGRESSION
        | {
            "min": 0,
            "prometheus": {**QUERY, "name": "error rate", "secretRef": {"name": "metrics"}},
            "forSeconds": 600,
        }
    ),
    "tags": promotion(tags={"ticket": "ML-7"}),
    "an endpoint": served(
        workloadSize="Large",
        workloadType="GPULarge",
        scaleToZero=False,
        environment={"TOKEN": "{{secrets/ml/token}}"},
        inferenceTable={"catalog": "ml", "schema": "logs", "tablePrefix": "support"},
        secretRef={"name": "databricks"},
    ),
    "an endpoint of which the name alone is set": promotion(
        serving={"type": "Databricks", "endpoint": "support"}
    ),
    "throughput": served(provisionedThroughput={"modelUnits": 50, "burstScaling": True}),
    "steps": canary(
        5, 25, 75, gates=[{"name": "errors", "type": "Metric", "metric": {"name": "errors", "max": 0.01}}]
    ),
    "one step": canary(99),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])


def test_the_api_server_fills_in_the_defaults(api: Api) -> None:
    body = promotion(approval={}, serving={"type": "Databricks", "endpoint": "support"})
    assert dry_run.create(api, body)["spec"] == LEAST | {
        "approval": {},
        "soakSeconds": 0,
        "onDrift": "Repair",
        "onDelete": "KeepAlias",
        "suspend": False,
        "tracking": {},
        "serving": {"type": "Databricks", "endpoint": "support", "aliasMoves": "AfterCanary"},
    }


NOT_FIXED = "cannot change: create a ModelPromotion with another name, and delete this one"
TRACKED: Json = {"uri": "https://mlflow.example.com"}

CHANGES: dict[str, tuple[Json, Json, str | None]] = {
    "model": (promotion(), {"model": "other"}, f"spec.model {NOT_FIXED}"),
    "alias": (promotion(), {"alias": "other"}, f"spec.alias {NOT_FIXED}"),
    "tracking that was not there": (promotion(), {"tracking": TRACKED}, f"spec.tracking.uri {NOT_FIXED}"),
    "tracking": (
        promotion(tracking=TRACKED),
        {"tracking": {"uri": "https://other.example.com"}},
        f"spec.tracking.uri {NOT_FIXED}",
    ),
    "a field that comes to tracking": (
        promotion(tracking=TRACKED),
        {"tracking": {"registryUri": "https://other.example.com"}},
        f"spec.tracking.registryUri {NOT_FIXED}",
    ),
    "a field that goes from tracking": (
        promotion(tracking=TRACKED),
        {"tracking": {"uri": None}},
        f"spec.tracking.uri {NOT_FIXED}",
    ),
    "tracking taken away": (
        promotion(tracking=TRACKED),
        {"tracking": None},
        f"spec.tracking.uri {NOT_FIXED}",
    ),
    "another Secret": (promotion(tracking=TRACKED), {"tracking": {"secretRef": {"name": "other"}}}, None),
    "the alias of the source": (
        promotion(),
        {"source": {"type": "Alias", "alias": "champion"}},
        "source.alias must differ from alias, which this promotion moves",
    ),
    "tracking that was not there, taken away": (promotion(), {"tracking": None}, None),
    "source": (promotion(), {"source": {"type": "Version", "alias": None, "version": 4}}, None),
    "gates": (promotion(), {"gates": [{"name": "better", "type": "Comparison", "comparison": BETTER}]}, None),
    "gates taken away": (gated(comparison=BETTER), {"gates": None}, None),
    "an approval": (promotion(approval={}), {"approvals": [{"version": 1, "by": "kim"}]}, None),
    "a rollback": (promotion(), {"rollbackTo": {"type": "Previous"}}, None),
    "a rollback that is over": (promotion(rollbackTo={"type": "Previous"}), {"rollbackTo": None}, None),
    "suspend": (promotion(), {"suspend": True}, None),
    "the rest": (
        promotion(),
        {"soakSeconds": 5, "onDrift": "Warn", "onDelete": "RemoveAlias", "tags": {"a": "b"}},
        None,
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_only_what_names_the_alias_is_fixed(api: Api, case: str) -> None:
    body, change, sentence = CHANGES[case]
    if sentence is None:
        assert dry_run.change(api, body, change)
        return
    with refused(sentence):
        dry_run.change(api, body, change)
