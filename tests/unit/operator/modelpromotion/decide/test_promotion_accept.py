"""What is wrong with a promotion although its schema is right."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.modelpromotion.decide.accept import mistakes
from finetune_operator.serving.choose import choose_backend
from finetune_operator.settings import Settings

Json = dict[str, Any]
MLFLOW = Settings(tracking_uri="http://mlflow:5000")
SPEC: Json = {"model": "m", "alias": "champion", "source": {"type": "Version", "version": 1}}
IN_CATALOG = {"tracking": {"uri": "databricks", "registryUri": "databricks-uc"}}
WINDOW = {"name": "night", "schedule": "0 2 * * *", "durationSeconds": 3600}
SERVING = {"type": "Databricks", "endpoint": "support"}
UNREADABLE = (
    "spec.serving.databricks.environment refers to a secret of the workspace in HF_TOKEN, and the chart's service principal would read "
    "the secret instead of you: set spec.serving.databricks.secretRef to a Secret with your own Databricks credentials"
)


def copy_of(**registry: Any) -> Json:
    """A source of type Registry."""
    return {"type": "Registry", "registry": {"version": 3, **registry}}


COPY = copy_of(uri="https://mlflow.dev.example", model="m")


def serving(secret: Json | None = None) -> Json:
    """An endpoint whose model gets a secret of the workspace."""
    variables = {"HF_TOKEN": "{{secrets/hub/token}}", "MODE": "fast"}
    return SERVING | {"databricks": {"environment": variables, **({"secretRef": secret} if secret else {})}}


CASES: dict[str, tuple[Json, Settings, list[str]]] = {
    "nothing": ({}, MLFLOW, []),
    "windows": ({"windows": [WINDOW, WINDOW | {"timeZone": "Asia/Tokyo", "schedule": "@daily"}]}, MLFLOW, []),
    "windows that never open": (
        {
            "windows": [
                WINDOW | {"schedule": "0 5-2 * * *"},
                WINDOW | {"timeZone": "Europe/Berlim"},
                WINDOW | {"schedule": "0 0 * * 5#2"},
            ]
        },
        MLFLOW,
        [
            "spec.windows[night].schedule 0 5-2 * * * is not valid: bad hour",
            "spec.windows[night].timeZone Europe/Berlim is unknown: set a name of the time zone database, such as Europe/Berlin",
            "spec.windows[night].schedule 0 0 * * 5#2 is not valid: set minute, hour, day of the month, month and day of the week as in "
            "a CronJob, such as 0 2 * * MON",
        ],
    ),
    "a copy": ({"source": COPY}, MLFLOW, []),
    "a copy into another model of the same registry": (
        {"source": copy_of(uri="http://mlflow:5000/", model="other")},
        MLFLOW,
        [],
    ),
    "a copy of the model into itself": (
        {"source": copy_of(uri="http://mlflow:5000/", model="m")},
        MLFLOW,
        [
            "spec.source.registry names model m of the registry that the version would be copied to: set spec.source.type to Version or Alias"
        ],
    ),
    "a copy into Unity Catalog": (
        {"source": COPY, "model": "main.llm.m"} | IN_CATALOG,
        MLFLOW,
        [
            "spec.source.type Registry copies into the registry of an MLflow server, not into Unity Catalog: copy the version with "
            "MLflow's client, and set spec.source.version to the copy"
        ],
    ),
    "a copy into a registry without a tracking server": (
        {"source": COPY, "tracking": {"registryUri": "http://registry:5000"}},
        Settings(),
        [
            "spec.source.type Registry needs a tracking server for the files of the copy: create a ModelPromotion with another name and "
            "spec.tracking.uri"
        ],
    ),
    "a password in the address": (
        {"tracking": {"uri": "https://me:secret@mlflow"}},
        MLFLOW,
        [
            "spec.tracking.uri contains a password: move it to a Secret with MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, and set spec.tracking.secretRef in a ModelPromotion with another name"
        ],
    ),
    "a registry of no known kind": (
        {"tracking": {"registryUri": "sqlite:///m.db"}},
        MLFLOW,
        [
            "the registry sqlite:///m.db in spec.tracking.registryUri is not supported: create a ModelPromotion "
            "with another name and the http or https address of an MLflow server, or databricks-uc"
        ],
    ),
    "a tracking server of no known kind": (
        {"tracking": {"uri": "file:///runs", "registryUri": "http://r"}},
        MLFLOW,
        [
            (
                "the tracking server file:///runs in spec.tracking.uri is not supported with the registry http://r: "
                "create a ModelPromotion with another name and an http or https address"
            )
        ],
    ),
    "an endpoint of a workspace beside the installation's MLflow": (
        {"serving": SERVING},
        MLFLOW,
        [
            "a Databricks endpoint can serve only models in Unity Catalog, but the registry is http://mlflow:5000: "
            "remove spec.serving, or create a ModelPromotion with another name and spec.tracking.registryUri "
            "databricks-uc"
        ],
    ),
    "Unity Catalog": ({"model": "main.llm.m", **IN_CATALOG}, MLFLOW, []),
    "a name of one level": (
        IN_CATALOG,
        MLFLOW,
        ["spec.model m must be catalog.schema.name in Unity Catalog"],
    ),
    "a secret of the workspace with the installation's login": (
        {"model": "main.llm.m", **IN_CATALOG, "serving": serving()},
        MLFLOW,
        [UNREADABLE],
    ),
    "a login that may be missing": (
        {"model": "main.llm.m", **IN_CATALOG, "serving": serving({"name": "mine", "optional": True})},
        MLFLOW,
        [UNREADABLE],
    ),
    "a secret of the workspace with a login of the namespace": (
        {"model": "main.llm.m", **IN_CATALOG, "serving": serving({"name": "mine"})},
        MLFLOW,
        [],
    ),
    "runs elsewhere": (
        {"model": "main.llm.m", "tracking": {"uri": "http://mlflow", "registryUri": "databricks-uc"}},
        MLFLOW,
        [
            "runs of models in Unity Catalog are read from their workspace: create a ModelPromotion with another "
            "name and spec.tracking.uri databricks, or without spec.tracking.uri"
        ],
    ),
}


@pytest.mark.parametrize(("parts", "settings", "expected"), CASES.values(), ids=CASES)
def test_mistakes(parts: Json, settings: Settings, expected: list[str]) -> None:
    spec = ModelPromotionSpec.model_validate(SPEC | parts)
    backend = choose_backend(spec.serving) if spec.serving else None
    assert [*mistakes(spec, backend, settings)] == expected
