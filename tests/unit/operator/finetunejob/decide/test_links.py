"""The pages that open in a browser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.status import ModelStatus
from finetune_crds.status_parts import Links
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    NO_MLFLOW,
    SETTINGS,
    conclude,
    ftj,
    observed,
    running,
    tracked,
)

Json = dict[str, Any]
INSIDE = Settings(tracking_uri="http://mlflow:5000", tracking_public_url="https://mlflow.example.org/")

# The settings, the spec, and where the pages of the run and of the model begin.
BASES: dict[str, tuple[Settings, Json, str, str | None]] = {
    "the installation's server": (SETTINGS, {}, "http://mlflow:5000", "http://mlflow:5000"),
    "as browsers see it": (INSIDE, {}, "https://mlflow.example.org", "https://mlflow.example.org"),
    "the job's own": (INSIDE, {"uri": "http://mine/"}, "http://mine", "http://mine"),
    "the job's own, as browsers see it": (
        INSIDE,
        {"uri": "http://mine", "publicUrl": "https://mine.example.org/"},
        "https://mine.example.org",
        "https://mine.example.org",
    ),
    "the installation's, as this job's people see it": (
        INSIDE,
        {"publicUrl": "https://vpn.example.org"},
        "https://vpn.example.org",
        "https://vpn.example.org",
    ),
    "a registry of its own": (
        INSIDE,
        {"uri": "http://mine", "publicUrl": "https://mine.example.org", "registryUri": "https://registry/"},
        "https://mine.example.org",
        None,
    ),
    "the installation's server, named by the job": (
        INSIDE,
        {"uri": "HTTP://MLflow:5000/"},
        "https://mlflow.example.org",
        "https://mlflow.example.org",
    ),
    "the installation's server as the registry": (
        INSIDE,
        {"uri": "http://mine", "registryUri": "http://mlflow:5000/"},
        "http://mine",
        "https://mlflow.example.org",
    ),
    "the same server as the registry, in another spelling": (
        INSIDE,
        {"uri": "http://mine:80", "registryUri": "http://mine/", "publicUrl": "https://mine.example.org"},
        "https://mine.example.org",
        "https://mine.example.org",
    ),
    "a registry of the installation": (
        replace(INSIDE, registry_uri="http://registry:5000"),
        {},
        "https://mlflow.example.org",
        None,
    ),
    "a registry without pages": (
        Settings(tracking_uri="http://mlflow:5000", registry_uri="databricks-uc"),
        {},
        "http://mlflow:5000",
        None,
    ),
}
MODEL = ModelStatus(name="our models/chat", version="3")


@pytest.mark.parametrize(("settings", "tracking", "run", "registry"), BASES.values(), ids=BASES)
def test_run_and_model(settings: Settings, tracking: Json, run: str, registry: str | None) -> None:
    before = running(model=MODEL)
    status = conclude(ftj(before, tracking=tracking), observed(mlflow=tracked()), settings=settings).status
    url = f"{run}/#/experiments/e1/runs/r1"
    model = f"{registry}/#/models/our%20models%2Fchat/versions/3" if registry else None
    assert status.mlflow is not None
    assert (status.mlflow.url, status.links) == (url, Links(run=url, model=model))


def dashboard(template: str, tracking_uri: str = "http://m") -> Settings:
    return Settings(tracking_uri=tracking_uri, dashboard_url=template)


ALL = "https://g/d/x?var-ns={namespace}&var-job={name}&var-run={runId}"
DASHBOARDS: dict[str, tuple[Settings, Mlflow, str | None]] = {
    "none": (dashboard(""), tracked(), None),
    "every field": (dashboard(ALL), tracked(), "https://g/d/x?var-ns=team&var-job=tune&var-run=r1"),
    "a run that does not exist yet": (dashboard(ALL), Mlflow(), None),
    "one that needs no run": (dashboard("https://g/{name}"), Mlflow(), "https://g/tune"),
}


@pytest.mark.parametrize(("settings", "mlflow", "expected"), DASHBOARDS.values(), ids=DASHBOARDS)
def test_dashboard(settings: Settings, mlflow: Mlflow, expected: str | None) -> None:
    links = conclude(ftj(), observed(mlflow=mlflow), settings=settings).status.links
    assert (links.dashboard if links else None) == expected


def test_without_any_page_there_is_no_list_of_them() -> None:
    assert conclude(ftj(), settings=NO_MLFLOW).status.links is None
