"""What the API server itself refuses of a ModelPromotion, each in its sentence, and what it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.api import Api
from support.refusals import refused

Json = dict[str, Any]

_LEAST: Json = {
    "model": "docstring-llama",
    "alias": "champion",
    "source": {"type": "Alias", "alias": "staging"},
}
BETTER: Json = {"metric": "eval_loss", "goal": "Minimize", "betterBy": {"relative": 0.05}}


def promotion(**spec: Any) -> Json:
    """A complete ModelPromotion; parts of the spec replaced, or left out with None."""
    merged = {key: value for key, value in (copy.deepcopy(_LEAST) | spec).items() if value is not None}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": "champion"},
        "spec": merged,
    }


def gated(**gate: Any) -> Json:
    """One with a single gate, of the type of its first part."""
    kind = next(iter(gate), "metric").capitalize()
    return promotion(gates=[{"name": "gate", "type": kind, **gate}])


def compared(**comparison: Any) -> Json:
    """One with a single comparison."""
    return gated(comparison={"metric": "eval_loss", "goal": "Minimize", **comparison})


def served(**databricks: Any) -> Json:
    """One with an endpoint."""
    return promotion(serving={"type": "Databricks", "databricks": {"endpoint": "support", **databricks}})


def canary(*percents: int, **fields: Any) -> Json:
    """One whose endpoint goes forward in steps."""
    steps = [{"percent": percent, "durationSeconds": 600} for percent in percents]
    return served(canary={"steps": steps, **fields})


RESERVED = "MLflow reserves the aliases latest and v<number>: choose another"
ONE_SOURCE = (
    "spec.source: Invalid value: set what type names: version for Version, alias for Alias, fineTuneJobRef for "
    "FineTuneJob, and nothing else"
)
WHAT_TYPE_NAMES = (
    "set what type names: metric for Metric, tag for Tag, comparison for Comparison, and nothing else"
)
ONE_KIND = f"spec.gates[0]: Invalid value: {WHAT_TYPE_NAMES}"
ONE_WAY = "spec.gates[0].comparison: Invalid value: set betterBy or notWorseThan"
ONE_TOLERANCE = "Invalid value: set absolute or relative"
NOT_REQUIRED = (
    "approval.required is false: remove version, by, bypassSoak and timeoutSeconds, or set it to true"
)
THREE_NAMES = "a model in Unity Catalog has three names: write spec.model as catalog.schema.name"
NO_SLASH = "MLflow allows no slash and no colon in the name of a model: remove them"
RISING = "each step must give the new version more traffic than the step before"
REPLACED = (
    "provisionedThroughput replaces workloadSize, workloadType, concurrency and scaleToZero: remove them"
)
NO_SUCH_KEY = "Unity Catalog allows none of . , - = / : in the key of a tag: rename it"
IN_CATALOG: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
NOT_IN_CATALOG = (
    "an endpoint of Databricks serves models in Unity Catalog: set tracking.registryUri to databricks-uc"
)
UNITS: Json = {"modelUnits": 50}
YEAR = 366 * 24 * 3600

REFUSED: dict[str, tuple[Json, str]] = {
    "an empty model": (promotion(model=""), "spec.model: Invalid value"),
    "a model that is a folder": (promotion(model="team/llama"), NO_SLASH),
    "a model that is an address": (promotion(model="models:llama"), NO_SLASH),
    "a model too long": (promotion(model="m" * 769), "spec.model: Too long: may not be more than 768"),
    "one name in Unity Catalog": (promotion(tracking={"registryUri": "databricks-uc"}), THREE_NAMES),
    "two names in Unity Catalog": (
        promotion(model="ml.llama", tracking={"registryUri": "databricks-uc"}),
        THREE_NAMES,
    ),
    "an empty name in Unity Catalog": (
        promotion(model="ml..llama", tracking={"registryUri": "databricks-uc://prod"}),
        THREE_NAMES,
    ),
    **{
        f"a tag with {mark}": (
            promotion(model="ml.prod.llama", tracking=IN_CATALOG, tags={"a_b": "c", f"a{mark}b": "c"}),
            NO_SUCH_KEY,
        )
        for mark in ".,-=/:"
    },
    "an endpoint beside another registry": (
        served() | {"spec": served()["spec"] | {"tracking": {"uri": "http://mlflow"}}},
        NOT_IN_CATALOG,
    ),
    "a range and a size": (
        served(concurrency={"min": 4, "max": 8}, workloadSize="Small"),
        "concurrency replaces workloadSize: remove one of them",
    ),
    "a range upside down": (served(concurrency={"min": 8, "max": 4}), "min is above max: swap them"),
    "no multiple of four": (
        served(concurrency={"min": 4, "max": 6}),
        "spec.serving.databricks.concurrency.max: Invalid value: 6",
    ),
    "no alias": (promotion(alias=None), "spec.alias: Required value"),
    "the alias latest": (promotion(alias="latest"), f"spec.alias: Invalid value: {RESERVED}"),
    "the alias Latest": (promotion(alias="Latest"), f"spec.alias: Invalid value: {RESERVED}"),
    "the alias v3": (promotion(alias="v3"), f"spec.alias: Invalid value: {RESERVED}"),
    "the alias V12": (promotion(alias="V12"), f"spec.alias: Invalid value: {RESERVED}"),
    "an alias with a space": (promotion(alias="my champion"), "spec.alias in body should match"),
    "an alias too long": (promotion(alias="a" * 256), "spec.alias: Too long: may not be more than 255"),
    "no source": (promotion(source=None), "spec.source: Required value"),
    "an empty source": (promotion(source={}), "spec.source.type: Required value"),
    "a source of another type": (promotion(source={"type": "Alias", "version": 1}), ONE_SOURCE),
    "two sources": (promotion(source={"type": "Version", "version": 1, "alias": "staging"}), ONE_SOURCE),
    "three sources": (
        promotion(
            source={"type": "Version", "version": 1, "alias": "staging", "fineTuneJobRef": {"name": "tune"}}
        ),
        ONE_SOURCE,
    ),
    "its own source": (
        promotion(source={"type": "Alias", "alias": "champion"}),
        "spec.source.alias: Invalid value: source.alias is the alias of this promotion: name another one",
    ),
    "a reserved source": (
        promotion(source={"type": "Alias", "alias": "v3"}),
        f"spec.source.alias: Invalid value: {RESERVED}",
    ),
    "version 0": (
        promotion(source={"type": "Version", "version": 0}),
        "spec.source.version in body should be greater than or",
    ),
    "version 0 as text": (
        promotion(source={"type": "Version", "version": "0"}),
        "spec.source.version in body should match",
    ),
    "a version too large": (
        promotion(source={"type": "Version", "version": 10_000_000_000}),
        "spec.source.version in body should be less than or equal to 9999999999",
    ),
    "a version with a letter": (
        promotion(source={"type": "Version", "version": "v3"}),
        "spec.source.version in body should match",
    ),
    "a version that is a fraction": (
        promotion(source={"type": "Version", "version": 1.5}),
        "spec.source.version",
    ),
    "a job with an empty name": (
        promotion(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": " "}}),
        "spec.source.fineTuneJobRef.name: Invalid value: the name of an object must have lowercase letters",
    ),
    "a Secret with a space": (
        promotion(tracking={"secretRef": {"name": "my login"}}),
        "spec.tracking.secretRef.name: Invalid value: the name of an object must have lowercase letters",
    ),
    "a Secret of the endpoint in capitals": (
        served(secretRef={"name": "Databricks"}),
        "spec.serving.databricks.secretRef.name: Invalid value: the name of an object must have lowercase letters",
    ),
    "a gate without a name": (
        promotion(gates=[{"metric": {"name": "eval_loss", "max": 3}}]),
        "spec.gates[0].name: Required value",
    ),
    "a gate with an empty name": (
        promotion(gates=[{"name": "-", "type": "Metric", "metric": {"name": "eval_loss", "max": 3}}]),
        "spec.gates[0].name in body should match",
    ),
    "two gates of a name": (
        promotion(
            gates=[
                {"name": "a", "type": "Comparison", "comparison": BETTER},
                {"name": "a", "type": "Comparison", "comparison": BETTER},
            ]
        ),
        'spec.gates[1]: Duplicate value: {"name":"a"}',
    ),
    "too many gates": (
        promotion(
            gates=[{"name": f"g{number}", "type": "Comparison", "comparison": BETTER} for number in range(33)]
        ),
        "spec.gates: Too many: 33: must have at most 32 items",
    ),
    "a gate of nothing": (gated(), ONE_KIND),
    "a gate of two kinds": (gated(comparison=BETTER, tag={"name": "tested", "equals": "yes"}), ONE_KIND),
    "a metric without bounds": (
        gated(metric={"name": "eval_loss"}),
        "spec.gates[0].metric: Invalid value: set min, max, or both",
    ),
    "min above max": (
        gated(metric={"name": "eval_loss", "min": 3, "max": 2}),
        "spec.gates[0].metric.min: Invalid value: min is above max",
    ),
    "a bound in words": (gated(metric={"name": "eval_loss", "max": "low"}), "spec.gates[0].metric.max"),
    "a tag without a value": (gated(tag={"name": "tested"}), "spec.gates[0].tag.equals: Required value"),
    "a comparison of nothing": (
        gated(comparison={"goal": "Minimize", "notWorseThan": {"absolute": 0}}),
        "spec.gates[0].comparison.metric: Required value",
    ),
    "a comparison without a tolerance": (compared(), ONE_WAY),
    "a comparison both ways": (
        compared(betterBy={"absolute": 1}, notWorseThan={"absolute": 1}),
        ONE_WAY,
    ),
    "a comparison without a goal": (
        gated(comparison={"metric": "accuracy", "betterBy": {"absolute": 0}}),
        "spec.gates[0].comparison.goal: Required value",
    ),
    "an unknown goal": (
        compared(goal="Lower", betterBy={"absolute": 1}),
        'spec.gates[0].comparison.goal: Unsupported value: "Lower": supported values: "Minimize", "Maximize"',
    ),
    "an empty tolerance": (compared(betterBy={}), f"spec.gates[0].comparison.betterBy: {ONE_TOLERANCE}"),
    "two tolerances": (
        compared(notWorseThan={"absolute": 1, "relative": 0.1}),
        f"spec.gates[0].comparison.notWorseThan: {ONE_TOLERANCE}",
    ),
    "a negative tolerance": (
        compared(betterBy={"absolute": -1}),
        "spec.gates[0].comparison.betterBy.absolute in body should be greater than or equal to 0",
    ),
    "five percent as 5": (
        compared(notWorseThan={"relative": 5}),
        "relative is a share of the value of the version that the alias points at: 0.05 for five percent",
    ),
    "a version approved without a required approval": (
        promotion(approval={"required": False, "version": 3}),
        f"spec.approval: Invalid value: {NOT_REQUIRED}",
    ),
    "a person for no approval": (promotion(approval={"required": False, "by": "kim"}), NOT_REQUIRED),
    "a bypass for no approval": (promotion(approval={"required": False, "bypassSoak": True}), NOT_REQUIRED),
    "a limit for no approval": (promotion(approval={"required": False, "timeoutSeconds": 60}), NOT_REQUIRED),
    "an approval by an empty name": (promotion(approval={"by": ""}), "spec.approval.by: Invalid value"),
    "no time to approve": (
        promotion(approval={"timeoutSeconds": 0}),
        "spec.approval.timeoutSeconds: Invalid value: 0",
    ),
    "too much time to approve": (
        promotion(approval={"timeoutSeconds": YEAR + 1}),
        f"should be less than or equal to {YEAR}",
    ),
    "an approval of an alias": (
        promotion(approval={"version": "staging"}),
        "spec.approval.version in body should match",
    ),
    "a negative soak": (promotion(soakSeconds=-1), "spec.soakSeconds: Invalid value: -1"),
    "a soak without end": (promotion(soakSeconds=YEAR + 1), f"should be less than or equal to {YEAR}"),
    "an unknown answer to drift": (
        promotion(onDrift="Ignore"),
        'spec.onDrift: Unsupported value: "Ignore": supported values: "Repair", "Warn", "Adopt"',
    ),
    "an unknown end": (
        promotion(onDelete="Delete"),
        'spec.onDelete: Unsupported value: "Delete": supported values: "KeepAlias", "RemoveAlias"',
    ),
    "back to a word": (promotion(rollbackTo="before"), "spec.rollbackTo in body must be of type object"),
    "back to no version": (
        promotion(rollbackTo={"type": "Version"}),
        "spec.rollbackTo.version: Invalid value: version and type Version require each other",
    ),
    "back to the previous version 2": (
        promotion(rollbackTo={"type": "Previous", "version": 2}),
        "version and type Version require each other",
    ),
    "back to 0": (
        promotion(rollbackTo={"type": "Version", "version": 0}),
        "spec.rollbackTo.version in body should be greater than or equal to 1",
    ),
    "a tag that is no text": (promotion(tags={"ticket": 1}), "spec.tags.ticket: Invalid value"),
    "too many tags": (
        promotion(tags={f"t{number}": "x" for number in range(65)}),
        "spec.tags: Too many: 65: must have at most 64 items",
    ),
    "serving nowhere": (
        promotion(serving={"type": "Databricks"}),
        "spec.serving.databricks: Invalid value: type Databricks needs databricks",
    ),
    "an endpoint without a name": (
        promotion(serving={"type": "Databricks", "databricks": {}}),
        "spec.serving.databricks.endpoint: Required value",
    ),
    "an endpoint with a dot": (
        served(endpoint="a.b"),
        "spec.serving.databricks.endpoint in body should match",
    ),
    "an unknown size": (served(workloadSize="Huge"), 'workloadSize: Unsupported value: "Huge"'),
    "an unknown machine": (served(workloadType="TPU"), 'workloadType: Unsupported value: "TPU"'),
    "throughput and a size": (served(provisionedThroughput=UNITS, workloadSize="Small"), REPLACED),
    "throughput and a machine": (served(provisionedThroughput=UNITS, workloadType="CPU"), REPLACED),
    "throughput that stops": (served(provisionedThroughput=UNITS, scaleToZero=True), REPLACED),
    "throughput with an environment": (
        served(provisionedThroughput=UNITS, environment={"A": "b"}),
        "an endpoint with provisioned throughput takes no environment: remove it",
    ),
    "no model units": (
        served(provisionedThroughput={"modelUnits": 0}),
        "provisionedThroughput.modelUnits: Invalid value: 0",
    ),
    "everything stays with the previous": (
        served(previousPercent=100),
        "spec.serving.databricks.previousPercent in body should be less than or equal to 99",
    ),
    "a table without a schema": (
        served(inferenceTable={"catalog": "ml"}),
        "spec.serving.databricks.inferenceTable.schema: Required value",
    ),
    "no steps": (canary(), "spec.serving.databricks.canary.steps"),
    "too many steps": (canary(*range(1, 12)), "canary.steps: Too many: 11: must have at most 10 items"),
    "a step of everything": (canary(100), "percent in body should be less than or equal to 99"),
    "a step of nothing": (canary(0), "percent in body should be greater than or equal to 1"),
    "a step without an end": (
        served(canary={"steps": [{"percent": 5, "durationSeconds": 604801}]}),
        "durationSeconds in body should be less than or equal to 604800",
    ),
    "steps that fall": (canary(50, 10), f"spec.serving.databricks.canary: Invalid value: {RISING}"),
    "steps that stand still": (canary(10, 10, 50), RISING),
    "two gates of a name on the way": (
        canary(5, gates=[{"name": "a", "type": "Comparison", "comparison": BETTER}] * 2),
        "spec.serving.databricks.canary.gates[1]: Duplicate value",
    ),
    "a gate of nothing on the way": (
        canary(5, gates=[{"name": "a", "type": "Tag"}]),
        f"spec.serving.databricks.canary.gates[0]: Invalid value: {WHAT_TYPE_NAMES}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, namespace: str, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


TAKEN: dict[str, Json] = {
    "the least": promotion(),
    "a version as a number": promotion(source={"type": "Version", "version": 3}),
    "a version as text": promotion(source={"type": "Version", "version": "3"}),
    "the largest version": promotion(source={"type": "Version", "version": 9_999_999_999}),
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
    "an approval": promotion(
        approval={"required": True, "version": 3, "by": "kim", "bypassSoak": True, "timeoutSeconds": YEAR}
    ),
    "an approval that is still to come": promotion(approval={}),
    "no approval": promotion(approval={"required": False}),
    "a soak of a year": promotion(soakSeconds=YEAR),
    **{f"onDrift {answer}": promotion(onDrift=answer) for answer in ("Repair", "Warn", "Adopt")},
    **{f"onDelete {end}": promotion(onDelete=end) for end in ("KeepAlias", "RemoveAlias")},
    "back to the version before": promotion(rollbackTo={"type": "Previous"}),
    "back to a number": promotion(rollbackTo={"type": "Version", "version": 2}),
    "the model of its own name": promotion(model=None),
    "back to text": promotion(rollbackTo={"type": "Version", "version": "2"}),
    "suspended": promotion(suspend=True),
    "tags": promotion(tags={"ticket": "ML-7"}),
    "an endpoint": served(
        workloadSize="Large",
        workloadType="GPULarge",
        scaleToZero=False,
        previousPercent=10,
        environment={"TOKEN": "{{secrets/ml/token}}"},
        inferenceTable={"catalog": "ml", "schema": "logs", "tablePrefix": "support"},
        secretRef={"name": "databricks"},
    ),
    "throughput": served(provisionedThroughput={"modelUnits": 50, "burstScaling": True}),
    "steps": canary(
        5, 25, 75, gates=[{"name": "errors", "type": "Metric", "metric": {"name": "errors", "max": 0.01}}]
    ),
    "one step": canary(99),
}


@pytest.mark.parametrize("case", TAKEN)
def test_the_schema_takes(api: Api, namespace: str, case: str) -> None:
    body = TAKEN[case]
    assert api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})


def test_the_api_server_fills_in_the_defaults(api: Api, namespace: str) -> None:
    body = promotion(approval={}, serving={"type": "Databricks", "databricks": {"endpoint": "support"}})
    found = api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})
    assert found["spec"] == _LEAST | {
        "approval": {"required": True},
        "soakSeconds": 0,
        "onDrift": "Repair",
        "onDelete": "KeepAlias",
        "suspend": False,
        "tracking": {},
        "serving": {"type": "Databricks", "databricks": {"endpoint": "support", "previousPercent": 0}},
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
        "source.alias is the alias of this promotion",
    ),
    "tracking that was not there, taken away": (promotion(), {"tracking": None}, None),
    "source": (promotion(), {"source": {"type": "Version", "alias": None, "version": 4}}, None),
    "gates": (promotion(), {"gates": [{"name": "better", "type": "Comparison", "comparison": BETTER}]}, None),
    "gates taken away": (gated(comparison=BETTER), {"gates": None}, None),
    "an approval": (promotion(approval={}), {"approval": {"version": 1}}, None),
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
def test_only_what_names_the_alias_is_fixed(api: Api, namespace: str, case: str) -> None:
    body, change, sentence = CHANGES[case]
    api.create({**body, "metadata": {**body["metadata"], "namespace": namespace}})
    if sentence is None:
        assert api.patch("ModelPromotion", namespace, "champion", {"spec": change})
        return
    with refused(sentence):
        api.patch("ModelPromotion", namespace, "champion", {"spec": change})
