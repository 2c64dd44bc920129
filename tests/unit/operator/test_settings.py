"""The operator's configuration."""

from __future__ import annotations

import pytest

from finetune_crds.finetunejob import Tracking
from finetune_operator.settings import Settings, SettingsError

READ: dict[str, tuple[dict[str, str], Settings]] = {
    "nothing set": ({}, Settings()),
    "empty keeps the default": ({"FINETUNE_PREP_IMAGE": "", "FINETUNE_WORKERS": ""}, Settings()),
    "everything": (
        {
            "FINETUNE_PREP_IMAGE": "p:1",
            "FINETUNE_TRAINER_IMAGE": "t:1",
            "FINETUNE_IMAGE_PULL_POLICY": "Always",
            "FINETUNE_TRACKING_URI": "http://m",
            "FINETUNE_REGISTRY_URI": "http://r",
            "FINETUNE_TRACKING_PUBLIC_URL": "https://m.example.org",
            "FINETUNE_NAMESPACE": "fs",
            "FINETUNE_DATABRICKS_HOST": "https://w.example.org",
            "FINETUNE_DATABRICKS_CLIENT_ID": "principal",
            "FINETUNE_DATABRICKS_TOKEN_FILE": "/var/run/token",
            "FINETUNE_NAMESPACES": "a, b,,",
            "FINETUNE_RESYNC_SECONDS": "60",
            "FINETUNE_POLL_SECONDS": "0.5",
            "FINETUNE_REGISTRATION_PATIENCE_SECONDS": "5",
            "FINETUNE_WORKERS": "4",
            "FINETUNE_LOG_LEVEL": "DEBUG",
            "FINETUNE_LOG_FORMAT": "json",
            "FINETUNE_METRICS_PORT": "0",
            "FINETUNE_LIVENESS": "http://127.0.0.1:9000/healthz",
            "OTHER": "x",
        },
        Settings(
            prep_image="p:1",
            trainer_image="t:1",
            image_pull_policy="Always",
            tracking_uri="http://m",
            registry_uri="http://r",
            tracking_public_url="https://m.example.org",
            namespace="fs",
            databricks_host="https://w.example.org",
            databricks_client_id="principal",
            databricks_token_file="/var/run/token",
            namespaces=("a", "b"),
            resync_seconds=60.0,
            poll_seconds=0.5,
            registration_patience_seconds=5.0,
            workers=4,
            log_level="DEBUG",
            log_format="json",
            metrics_port=0,
            liveness="http://127.0.0.1:9000/healthz",
        ),
    ),
}


@pytest.mark.parametrize(("environment", "expected"), READ.values(), ids=READ)
def test_read(environment: dict[str, str], expected: Settings) -> None:
    assert Settings.from_environment(environment) == expected


REFUSED: dict[str, tuple[str, str, str]] = {
    "no number": ("FINETUNE_WORKERS", "many", "FINETUNE_WORKERS=many is not a number"),
    "no whole number": ("FINETUNE_WORKERS", "1.5", "FINETUNE_WORKERS=1.5 is not a number"),
    "zero": ("FINETUNE_POLL_SECONDS", "0", "FINETUNE_POLL_SECONDS=0 must be above 0"),
    "negative": ("FINETUNE_RESYNC_SECONDS", "-1", "FINETUNE_RESYNC_SECONDS=-1 must be above 0"),
    "infinite": ("FINETUNE_RESYNC_SECONDS", "inf", "FINETUNE_RESYNC_SECONDS=inf is not a number"),
    "not a number": ("FINETUNE_RESYNC_SECONDS", "nan", "FINETUNE_RESYNC_SECONDS=nan is not a number"),
    "no level": (
        "FINETUNE_LOG_LEVEL",
        "loud",
        "FINETUNE_LOG_LEVEL=loud is not one of CRITICAL, ERROR, WARNING, INFO, DEBUG",
    ),
    "no format": ("FINETUNE_LOG_FORMAT", "xml", "FINETUNE_LOG_FORMAT=xml is not one of plain, json"),
    "a field that a dashboard does not know": (
        "FINETUNE_DASHBOARD_URL",
        "https://g/d?job={job}",
        "FINETUNE_DASHBOARD_URL=https://g/d?job={job} is not an http or https URL with {namespace}, {name}, {runId}",
    ),
    "a dashboard without a scheme": (
        "FINETUNE_DASHBOARD_URL",
        "g/d",
        "FINETUNE_DASHBOARD_URL=g/d is not an http or https URL with {namespace}, {name}, {runId}",
    ),
    "a password in plain sight": (
        "FINETUNE_TRACKING_URI",
        "http://me:s3cr3t@m",
        "FINETUNE_TRACKING_URI holds a password, which the status of every job would show: remove it",
    ),
}


@pytest.mark.parametrize(("variable", "text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment({variable: text})
    assert str(raised.value) == message


SERVERS: dict[str, tuple[Settings, Tracking, tuple[str, str]]] = {
    "none": (Settings(), Tracking(), ("", "")),
    "the default": (Settings(tracking_uri="http://m"), Tracking(), ("http://m", "http://m")),
    "the default registry": (
        Settings(tracking_uri="http://m", registry_uri="http://r"),
        Tracking(),
        ("http://m", "http://r"),
    ),
    "the job's own": (
        Settings(tracking_uri="http://m", registry_uri="http://r"),
        Tracking(uri="http://mine"),
        ("http://mine", "http://mine"),
    ),
    "the job's own registry": (
        Settings(tracking_uri="http://m", registry_uri="http://r"),
        Tracking(registry_uri="http://mine"),
        ("http://m", "http://mine"),
    ),
}


@pytest.mark.parametrize(("settings", "tracking", "expected"), SERVERS.values(), ids=SERVERS)
def test_servers(settings: Settings, tracking: Tracking, expected: tuple[str, str]) -> None:
    assert settings.servers(tracking) == expected
