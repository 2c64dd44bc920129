"""What the API server refuses of a ModelPromotion, each in its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from integration.schema import dry_run
from integration.schema.promotions import (
    BETTER,
    ON_REGRESSION,
    QUERY,
    WINDOW,
    YEAR,
    canary,
    compared,
    gated,
    promotion,
    served,
)
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]

RESERVED = "MLflow reserves the aliases latest and v<number>: choose another"
ONE_SOURCE = (
    "spec.source: Invalid value: set only the field that matches type: version for Version, alias for Alias, "
    "fineTuneJobRef for FineTuneJob, registry for Registry"
)
WHAT_TYPE_NAMES = (
    "set only the field that matches type: metric for Metric, tag for Tag, comparison for Comparison"
)
ONE_KIND = f"spec.gates[0]: Invalid value: {WHAT_TYPE_NAMES}, job for Job"
ONE_WAY = "spec.gates[0].comparison: Invalid value: set exactly one of betterBy and notWorseThan"
ONE_TOLERANCE = "Invalid value: set exactly one of absolute and relative"
THREE_NAMES = "model must be catalog.schema.name for a model in Unity Catalog"
NO_SLASH = "MLflow does not allow slashes, colons or leading dots in the name of a model: remove them"
TOO_LONG = "MLflow allows at most 256 characters in the name of a model, and Unity Catalog 255 in each of the three parts"
RISING = "each step must give the new version more traffic than the step before"
REPLACED = "workloadSize, workloadType, concurrency, scaleToZero and environment must not be set when provisionedThroughput is set"
NO_SUCH_KEY = "Unity Catalog does not allow . , - = / : in the key of a tag, or a space at its start or end: rename the tag"
IN_CATALOG: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
NOT_IN_CATALOG = (
    "serving.type Databricks requires a model in Unity Catalog: set tracking.registryUri to databricks-uc"
)
UNITS: Json = {"modelUnits": 50}

REFUSED: dict[str, tuple[Json, str]] = {
    "an empty model": (promotion(model=""), "spec.model: Invalid value"),
    "a model that is a folder": (promotion(model="team/llama"), NO_SLASH),
    "a model that is an address": (promotion(model="models:llama"), NO_SLASH),
    "a model that looks like a path": (promotion(model="../llama"), NO_SLASH),
    "a model too long for MLflow": (promotion(model="m" * 257), TOO_LONG),
    "a model too long for Unity Catalog": (promotion(model=f"ml.prod.{'m' * 256}"), TOO_LONG),
    "a model too long": (promotion(model="m" * 769), "spec.model: Too long: may not be "),
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
        f"the tag {key!r}": (
            promotion(model="ml.prod.llama", tracking=IN_CATALOG, tags={"a b": "c", key: "c"}),
            NO_SUCH_KEY,
        )
        for key in ("a.b", "a,b", "a-b", "a=b", "a/b", "a:b", " a", "a ")
    },
    "an endpoint beside another registry": (
        served() | {"spec": served()["spec"] | {"tracking": {"uri": "http://mlflow"}}},
        NOT_IN_CATALOG,
    ),
    "a range and a size": (
        served(concurrency={"min": 4, "max": 8}, workloadSize="Small"),
        "workloadSize must not be set when concurrency is set",
    ),
    "a range upside down": (served(concurrency={"min": 8, "max": 4}), "min must not be above max: swap them"),
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
    "an alias too long": (promotion(alias="a" * 256), "spec.alias: Too long: may not be "),
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
        "spec.source.alias: Invalid value: source.alias must differ from alias, which this promotion moves",
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
    "a registry without a version": (
        promotion(source={"type": "Registry", "registry": {"uri": "https://dev", "model": "m"}}),
        "spec.source.registry: Invalid value: set exactly one of version and alias",
    ),
    "a registry that is no MLflow server": (
        promotion(
            source={"type": "Registry", "registry": {"uri": "databricks-uc", "model": "m", "version": 3}}
        ),
        "spec.source.registry.uri in body should match",
    ),
    "a login in the address of a registry": (
        promotion(
            source={"type": "Registry", "registry": {"uri": "https://me:pw@dev", "model": "m", "version": 3}}
        ),
        "spec.source.registry.uri in body should match",
    ),
    "a job with an empty name": (
        promotion(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": " "}}),
        "spec.source.fineTuneJobRef.name in body should match",
    ),
    "a Secret with a space": (
        promotion(tracking={"secretRef": {"name": "my login"}}),
        "spec.tracking.secretRef.name in body should match",
    ),
    "a Secret of the endpoint in capitals": (
        served(secretRef={"name": "Databricks"}),
        "spec.serving.databricks.secretRef.name in body should match",
    ),
    "two windows of one name": (promotion(windows=[WINDOW, WINDOW]), "spec.windows[1]: Duplicate value"),
    "a window without a duration": (
        promotion(windows=[{"name": "night", "schedule": "@daily"}]),
        "spec.windows[0].durationSeconds: Required value",
    ),
    "a window of a moment": (
        promotion(windows=[WINDOW | {"durationSeconds": 59}]),
        "spec.windows[0].durationSeconds in body should be greater than or equal to 60",
    ),
    "a window of more than a week": (
        promotion(windows=[WINDOW | {"durationSeconds": 604801}]),
        "spec.windows[0].durationSeconds in body should be less than or equal to 604800",
    ),
    "a window of six fields": (
        promotion(windows=[WINDOW | {"schedule": "0 0 2 * * *"}]),
        "spec.windows[0].schedule in body should match",
    ),
    "a window in no time zone": (
        promotion(windows=[WINDOW | {"timeZone": "UTC+2:00"}]),
        "spec.windows[0].timeZone in body should match",
    ),
    "a number of two servers": (
        promotion(
            onRegression=ON_REGRESSION | {"endpointMetric": "error_rate"},
            serving={"type": "Databricks", "endpoint": "support"},
        ),
        "spec.onRegression: Invalid value: set exactly one of prometheus and endpointMetric",
    ),
    "a metric of no endpoint": (
        promotion(
            onRegression={name: value for name, value in ON_REGRESSION.items() if name != "prometheus"}
            | {"endpointMetric": "error_rate"}
        ),
        "spec.onRegression: Invalid value: onRegression.endpointMetric requires serving",
    ),
    "another reaction to a number": (
        promotion(onRegression=ON_REGRESSION | {"action": "Pause"}),
        'spec.onRegression.action: Unsupported value: "Pause"',
    ),
    "a number without bounds": (
        promotion(onRegression={key: value for key, value in ON_REGRESSION.items() if key != "max"}),
        "spec.onRegression: Invalid value: set min, max, or both",
    ),
    "bounds upside down": (
        promotion(onRegression=ON_REGRESSION | {"min": 0.5}),
        "spec.onRegression.min: Invalid value: min must not be above max",
    ),
    "a breach longer than the watch": (
        promotion(onRegression=ON_REGRESSION | {"forSeconds": 601}),
        "spec.onRegression.forSeconds: Invalid value: forSeconds must not be above watchSeconds",
    ),
    "a number without a query": (
        promotion(onRegression=ON_REGRESSION | {"prometheus": {"url": "http://prometheus:9090"}}),
        "spec.onRegression.prometheus.query: Required value",
    ),
    **{
        f"a Prometheus at {url}": (
            promotion(onRegression=ON_REGRESSION | {"prometheus": {**QUERY, "url": url}}),
            "spec.onRegression.prometheus.url in body should match",
        )
        for url in (
            "",
            "prometheus:9090",
            "file:///etc/passwd",
            "http://me:secret@prometheus",
            "http://p?q=1",
        )
    },
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
        "spec.gates[1]: Duplicate value: ",
    ),
    "too many gates": (
        promotion(
            gates=[{"name": f"g{number}", "type": "Comparison", "comparison": BETTER} for number in range(33)]
        ),
        "spec.gates: Too many: 33: must have at most 32 items",
    ),
    "a gate of nothing": (gated(), ONE_KIND),
    "a gate of two kinds": (gated(comparison=BETTER, tag={"name": "tested", "equals": "yes"}), ONE_KIND),
    "a Job without an image": (gated(job={"command": ["pytest"]}), "spec.gates[0].job.image: Required value"),
    "a variable of the operator": (
        gated(job={"image": "tests:1", "env": [{"name": "MODEL_URI", "value": "models:/other/1"}]}),
        "the operator sets MODEL_URI, MODEL_NAME, MODEL_VERSION and METRICS_PATH: remove them from env",
    ),
    "a variable of every pod": (
        gated(job={"image": "tests:1", "env": [{"name": "MLFLOW_RUN_ID", "value": "r1"}]}),
        "the operator sets MLFLOW_RUN_ID",
    ),
    "too many Jobs": (
        promotion(
            gates=[{"name": f"g{number}", "type": "Job", "job": {"image": "tests:1"}} for number in range(9)]
        ),
        "at most 8 gates can have type Job",
    ),
    "a number of no Job": (
        gated(metric={"name": "acc", "min": 0.5, "job": "tests"}),
        "metric.job and comparison.job must be the name of a gate of type Job",
    ),
    "a comparison of the number of another gate": (
        promotion(
            gates=[
                {"name": "a", "type": "Metric", "metric": {"name": "acc", "min": 0.5}},
                {"name": "b", "type": "Comparison", "comparison": {**BETTER, "job": "a"}},
            ]
        ),
        "metric.job and comparison.job must be the name of a gate of type Job",
    ),
    "a Job in a canary": (
        canary(50, gates=[{"name": "tests", "type": "Job", "job": {"image": "tests:1"}}]),
        'Unsupported value: "Job": supported values: "Metric", "Tag", "Comparison"',
    ),
    "the number of a Job in a canary": (
        canary(
            50, gates=[{"name": "a", "type": "Metric", "metric": {"name": "acc", "min": 0.5, "job": "tests"}}]
        ),
        "a gate of a canary cannot use the number of a Job: set the gate in spec.gates",
    ),
    "a metric without bounds": (
        gated(metric={"name": "eval_loss"}),
        "spec.gates[0].metric: Invalid value: set min, max, or both",
    ),
    "min above max": (
        gated(metric={"name": "eval_loss", "min": 3, "max": 2}),
        "spec.gates[0].metric.min: Invalid value: min must not be above max",
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
        "notWorseThan.relative in body should be less than or equal to 1",
    ),
    "an approval by an empty name": (
        promotion(approvals=[{"version": 1, "by": ""}]),
        "spec.approvals[0].by: Invalid value",
    ),
    "an approval by nobody": (promotion(approvals=[{"version": 1}]), "spec.approvals[0].by: Required value"),
    "an approval of no version": (
        promotion(approvals=[{"by": "kim"}]),
        "spec.approvals[0].version: Required value",
    ),
    "two approvals by one person": (
        promotion(approvals=[{"version": 1, "by": "kim"}, {"version": 2, "by": "kim"}]),
        "spec.approvals[1]: Duplicate value",
    ),
    "too many approvals": (
        promotion(approvals=[{"version": 1, "by": str(number)} for number in range(17)]),
        "spec.approvals: Too many: 17: must have at most 16 items",
    ),
    "no time to approve": (
        promotion(approval={"timeoutSeconds": 0}),
        "spec.approval.timeoutSeconds: Invalid value: 0",
    ),
    "too much time to approve": (
        promotion(approval={"timeoutSeconds": YEAR + 1}),
        f"should be less than or equal to {YEAR}",
    ),
    "an approval of an alias": (
        promotion(approvals=[{"version": "staging", "by": "kim"}]),
        "spec.approvals[0].version in body should match",
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
        "spec.rollbackTo.version: Invalid value: version is required when type is Version, and forbidden otherwise",
    ),
    "back to the previous version 2": (
        promotion(rollbackTo={"type": "Previous", "version": 2}),
        "version is required when type is Version, and forbidden otherwise",
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
    "an endpoint without a name": (
        promotion(serving={"type": "Databricks"}),
        "spec.serving.endpoint: Invalid value: endpoint is required: set it to the name of the endpoint",
    ),
    "an endpoint without a type": (
        promotion(serving={"endpoint": "support"}),
        "spec.serving.type: Required value",
    ),
    "an endpoint with a dot": (
        promotion(serving={"type": "Databricks", "endpoint": "a.b"}),
        "spec.serving.endpoint in body should match",
    ),
    "an unknown size": (served(workloadSize="Huge"), 'workloadSize: Unsupported value: "Huge"'),
    "an unknown machine": (served(workloadType="TPU"), 'workloadType: Unsupported value: "TPU"'),
    "throughput and a size": (served(provisionedThroughput=UNITS, workloadSize="Small"), REPLACED),
    "throughput and a machine": (served(provisionedThroughput=UNITS, workloadType="CPU"), REPLACED),
    "throughput that stops": (served(provisionedThroughput=UNITS, scaleToZero=True), REPLACED),
    "throughput with an environment": (
        served(provisionedThroughput=UNITS, environment={"A": "b"}),
        "environment must not be set when provisionedThroughput is set",
    ),
    "no model units": (
        served(provisionedThroughput={"modelUnits": 0}),
        "provisionedThroughput.modelUnits: Invalid value: 0",
    ),
    "a table without a schema": (
        served(inferenceTable={"catalog": "ml"}),
        "spec.serving.databricks.inferenceTable.schema: Required value",
    ),
    "no steps": (canary(), "spec.serving.canary.steps"),
    "too many steps": (canary(*range(1, 12)), "canary.steps: Too many: 11: must have at most 10 items"),
    "a step of everything": (canary(100), "percent in body should be less than or equal to 99"),
    "a step of nothing": (canary(0), "percent in body should be greater than or equal to 1"),
    "a step without an end": (
        promotion(
            serving={
                "type": "Databricks",
                "endpoint": "support",
                "canary": {"steps": [{"percent": 5, "durationSeconds": 604801}]},
            }
        ),
        "durationSeconds in body should be less than or equal to 604800",
    ),
    "steps that fall": (canary(50, 10), f"spec.serving.canary: Invalid value: {RISING}"),
    "steps that stand still": (canary(10, 10, 50), RISING),
    "two gates of a name on the way": (
        canary(5, gates=[{"name": "a", "type": "Comparison", "comparison": BETTER}] * 2),
        "spec.serving.canary.gates[1]: Duplicate value",
    ),
    "a gate of nothing on the way": (
        canary(5, gates=[{"name": "a", "type": "Tag"}]),
        f"spec.serving.canary.gates[0]: Invalid value: {WHAT_TYPE_NAMES}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)
