"""The operator's configuration, from variables and arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from finetune_crds.tracking import Tracking
from finetune_operator.defaults import Defaults
from finetune_operator.settings import Settings, SettingsError

READ: dict[str, tuple[dict[str, str], Settings]] = {
    "nothing set": ({}, Settings()),
    "empty keeps the default": ({"FINETUNE_PREP_IMAGE": "", "FINETUNE_WORKERS": ""}, Settings()),
    "everything": (
        {
            "FINETUNE_PREP_IMAGE": "p:1",
            "FINETUNE_TRAINER_IMAGE": "t:1",
            "FINETUNE_PREP_PULL_POLICY": "Always",
            "FINETUNE_TRAINER_PULL_POLICY": "Never",
            "FINETUNE_POD_USER": "0",
            "FINETUNE_TRACKING_URI": "http://m",
            "FINETUNE_REGISTRY_URI": "http://r",
            "FINETUNE_TRACKING_PUBLIC_URL": "https://m.example.org",
            "FINETUNE_NAMESPACE": "fs",
            "FINETUNE_DATABRICKS_HOST": "https://w.example.org",
            "FINETUNE_DATABRICKS_CLIENT_ID": "principal",
            "FINETUNE_DATABRICKS_TOKEN_FILE": "/var/run/token",
            "FINETUNE_DATABRICKS_NAMESPACES": "research,support",
            "FINETUNE_NAMESPACES": "a, b,,",
            "FINETUNE_RESYNC_SECONDS": "60",
            "FINETUNE_POLL_SECONDS": "0.5",
            "FINETUNE_REGISTRATION_PATIENCE_SECONDS": "5",
            "FINETUNE_WORKERS": "4",
            "FINETUNE_NETWORK_POLICIES": "true",
            "FINETUNE_LOG_LEVEL": "DEBUG",
            "FINETUNE_LOG_FORMAT": "json",
            "FINETUNE_METRICS_PORT": "0",
            "FINETUNE_LIVENESS": "http://127.0.0.1:9000/healthz",
            "OTHER": "x",
        },
        Settings(
            prep_image="p:1",
            trainer_image="t:1",
            prep_pull_policy="Always",
            trainer_pull_policy="Never",
            pod_user=0,
            tracking_uri="http://m",
            registry_uri="http://r",
            tracking_public_url="https://m.example.org",
            namespace="fs",
            databricks_host="https://w.example.org",
            databricks_client_id="principal",
            databricks_token_file="/var/run/token",
            databricks_namespaces=("research", "support"),
            namespaces=("a", "b"),
            resync_seconds=60.0,
            poll_seconds=0.5,
            registration_patience_seconds=5.0,
            workers=4,
            network_policies=True,
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


def test_the_defaults_of_jobs_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text("storage: s3://bucket/root\n", encoding="utf-8")
    settings = Settings.from_environment({"FINETUNE_DEFAULTS": str(file)})
    assert settings == Settings(defaults=Defaults(storage="s3://bucket/root"))


WRONG_DEFAULTS: dict[str, tuple[str | None, str]] = {
    "no file": (None, "cannot be read: No such file or directory"),
    "no YAML": ("storage: [", "is not YAML at line 1"),
    "an unknown key": ("storge: s3://b", "is invalid at storge: unknown field"),
    "the name of a field in Python": (
        "queue_name: team",
        "is invalid at queue_name: unknown field",
    ),
    "an image of all pods": (
        "pods: {all: {image: a}}",
        "is invalid at pods.all.image: unknown field",
    ),
    "a role that is none": ("pods: {trainer: {}}", "is invalid at pods.trainer: unknown field"),
    "an unknown key of a catalog": (
        "catalog: {type: Hive, hive: {uri: thrift://a:9083, url: a}}",
        "is invalid at catalog.hive.url: unknown field",
    ),
    "an unknown key of checkpoints": (
        "checkpoint: {everyStep: 1}",
        "is invalid at checkpoint.everyStep: unknown field",
    ),
    "a wrong value": ("checkpoint: {keep: 0}", "is invalid at checkpoint.keep: "),
}


@pytest.mark.parametrize(("text", "said"), WRONG_DEFAULTS.values(), ids=WRONG_DEFAULTS)
def test_wrong_defaults_are_said_at_the_start(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "defaults.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=re.escape(f"FINETUNE_DEFAULTS: {file} {said}")):
        Settings.from_environment({"FINETUNE_DEFAULTS": str(file)})


REFUSED: dict[str, tuple[str, str, str]] = {
    "no number": ("FINETUNE_WORKERS", "many", "FINETUNE_WORKERS=many is not a whole number"),
    "no whole number": ("FINETUNE_WORKERS", "1.5", "FINETUNE_WORKERS=1.5 is not a whole number"),
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
    "no pull policy": (
        "FINETUNE_PREP_PULL_POLICY",
        "never",
        "FINETUNE_PREP_PULL_POLICY=never is not one of Always, IfNotPresent, Never",
    ),
    "a field that a dashboard does not know": (
        "FINETUNE_DASHBOARD_URL",
        "https://g/d?job={job}",
        "FINETUNE_DASHBOARD_URL=https://g/d?job={job} must be an http or https URL with no other placeholders than {namespace}, {name}, {runId}",
    ),
    "a dashboard without a scheme": (
        "FINETUNE_DASHBOARD_URL",
        "g/d",
        "FINETUNE_DASHBOARD_URL=g/d must be an http or https URL with no other placeholders than {namespace}, {name}, {runId}",
    ),
    "a password in plain sight": (
        "FINETUNE_TRACKING_URI",
        "http://me:s3cr3t@m",
        "FINETUNE_TRACKING_URI contains a password, which the status of every job would show: remove the password",
    ),
}


@pytest.mark.parametrize(("variable", "text", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_environment({variable: text})
    assert str(raised.value) == message


ARGUMENTS: dict[str, tuple[list[str], Settings]] = {
    "none": ([], Settings(workers=4)),
    "one word": (["--workers=8"], Settings(workers=8)),
    "two words": (
        ["--namespaces", "a,b", "--poll-seconds", "1"],
        Settings(namespaces=("a", "b"), poll_seconds=1.0, workers=4),
    ),
    "an empty one keeps the default": (["--workers="], Settings()),
    "off": (["--network-policies=false"], Settings(network_policies=False, workers=4)),
    "on": (["--network-policies=true"], Settings(network_policies=True, workers=4)),
}


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_argument_goes_before_its_variable(arguments: list[str], expected: Settings) -> None:
    assert Settings.from_command_line(arguments, {"FINETUNE_WORKERS": "4"}) == expected


WRONG_ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "no setting": (
        ["--worker=8"],
        "unknown option --worker=8: run `finetune-operator --help` for the options",
    ),
    "no option": (["run"], "unknown option run: run `finetune-operator --help` for the options"),
    "no value": (["--workers"], "argument --workers: expected one argument"),
    "no number": (["--workers=many"], "FINETUNE_WORKERS=many is not a whole number"),
    "no switch": (["--network-policies=no"], "FINETUNE_NETWORK_POLICIES=no is not one of true, false"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_command_line(arguments, {})
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
