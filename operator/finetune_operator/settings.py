"""The operator's configuration, from its environment and its arguments."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from finetune_crds.modelpromotion import PromotionTracking
from finetune_crds.tracking import Tracking
from finetune_operator.defaults import Defaults
from finetune_operator.installation_files import InstallationFileError, load

DASHBOARD_FIELDS = ("namespace", "name", "runId")
"""The placeholders that a dashboard's URL may have in braces."""
DATABRICKS = "databricks"
"""The tracking URI of a Databricks workspace."""
UNITY_CATALOG = "databricks-uc"
"""The registry URI of Unity Catalog."""


class SettingsError(ValueError):
    """The operator's environment is invalid."""


@dataclass(frozen=True)
class Settings:
    """The configuration of the operator, which the chart sets.

    Attributes:
        prep_image: default image of preparation pods.
        trainer_image: default image of training pods.
        prep_pull_policy: pull policy of preparation pods.
        trainer_pull_policy: pull policy of training pods.
        prep_wheels: folder with the wheel for preparations on Databricks, which the operator's image sets; empty for none.
        pod_user: user, group and fsGroup of pods with the product's images; 0 to set none, as on OpenShift, which assigns them.
        tracking_uri: default MLflow server; empty for none.
        registry_uri: default model registry; empty for the tracking server.
        tracking_public_url: URL of the default MLflow server for a browser; empty for `tracking_uri`.
        dashboard_url: URL of a job's dashboard, with {namespace}, {name} and {runId}; empty for none.
        namespace: the operator's own namespace, where it keeps its Leases.
        lease_name: the Lease by which the operator's replicas elect their leader.
        lease_seconds: duration of this Lease: if the leader does not renew it for so long, another replica leads.
        replica: unique name of this replica, which stays the same when its process restarts; empty for none.
        databricks_host: Databricks workspace for resources that name no Secret; empty for none.
        databricks_client_id: service principal of the operator's login to this workspace; empty for account-wide federation.
        databricks_token_audience: audience of the service-account tokens that pods of jobs use to log in to this workspace.
        databricks_namespaces: namespaces whose preparations may run on Databricks with the operator's login.
        databricks_token_file: file with the service-account token that the operator exchanges for a token of this workspace.
        namespaces: namespaces to watch; empty for all.
        resync_seconds: longest time between two reconciliations of a resource without an event; finished jobs may wait longer.
        poll_seconds: interval at which servers outside the cluster, such as MLflow, are read while a job or a promotion is active.
        registration_patience_seconds: how long after training a model version may take to appear.
        workers: number of resources of each kind that are reconciled at the same time.
        network_policies: whether jobs whose pods connect to each other get a NetworkPolicy, for which the operator needs rights.
        log_level: Python's name of the level.
        log_format: plain or json.
        metrics_port: port of the Prometheus metrics; 0 for none.
        liveness: address of the probes.
        defaults: defaults for fields that a FineTuneJob leaves out; the variable is the path of a YAML file.
        tenancy_file: YAML file with what each tenant may use; empty if all namespaces may use everything.
        webhooks_file: YAML file with the webhooks that get a notice of each move of an alias; empty for none.
    """

    prep_image: str = "finetune-prep:latest"
    trainer_image: str = "finetune-trainer:latest"
    prep_pull_policy: str = "IfNotPresent"
    trainer_pull_policy: str = "IfNotPresent"
    prep_wheels: str = ""
    pod_user: int = 65532
    tracking_uri: str = ""
    registry_uri: str = ""
    tracking_public_url: str = ""
    dashboard_url: str = ""
    namespace: str = "default"
    lease_name: str = "finetune-operator"
    lease_seconds: int = 10
    replica: str = ""
    databricks_host: str = ""
    databricks_client_id: str = ""
    databricks_token_audience: str = ""
    databricks_token_file: str = ""
    databricks_namespaces: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    resync_seconds: float = 30.0
    poll_seconds: float = 5.0
    registration_patience_seconds: float = 60.0
    workers: int = 16
    network_policies: bool = False
    log_level: str = "INFO"
    log_format: str = "plain"
    metrics_port: int = 8081
    liveness: str = "http://0.0.0.0:8080/healthz"
    defaults: Defaults = field(default_factory=Defaults)
    tenancy_file: str = ""
    webhooks_file: str = ""

    def servers(self, tracking: Tracking | PromotionTracking) -> tuple[str, str]:
        """The addresses of the MLflow server and of the model registry of a resource; empty if there is none.

        The default registry applies only with the default server: for a resource with its own server, the registry defaults to that
        server. The models of a Databricks workspace are in Unity Catalog, and the runs of these models in the workspace.
        """
        server = tracking.uri or self.tracking_uri
        default_registry = "" if tracking.uri else self.registry_uri
        registry_of_server = UNITY_CATALOG if server == DATABRICKS else server
        return server, tracking.registry_uri or default_registry or registry_of_server

    def on_databricks(self, tracking: Tracking | PromotionTracking) -> bool:
        """Whether the runs of a resource are in a Databricks workspace."""
        server, _ = self.servers(tracking)
        return server == DATABRICKS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the FINETUNE_* variables; a variable that is absent or empty keeps its default.

        Raises:
            SettingsError: a value cannot be read; the message names the variable.
        """
        values: dict[str, object] = {}
        for name, default in vars(cls()).items():
            variable = _variable_name(name)
            text = environment.get(variable, "")
            if text:
                values[name] = _parse(variable, text, default)
        return cls(**values)  # type: ignore[arg-type]

    @classmethod
    def from_command_line(
        cls, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
    ) -> Settings:
        """Read options and FINETUNE_* variables. An option such as `--poll-seconds 5` takes precedence over FINETUNE_POLL_SECONDS.

        Raises:
            SettingsError: a value cannot be read, or an option is unknown.
        """
        parser = argparse.ArgumentParser(
            prog="finetune-operator",
            description="Reconcile FineTuneJobs, ModelPromotions and FineTuneSchedules.",
            epilog="If an option is not set, its variable applies; docs/operations/settings.md describes both.",
            allow_abbrev=False,
            exit_on_error=False,
        )
        for name, default in vars(cls()).items():
            description = f"{_variable_name(name)}; default {_describe_default(default)}"
            parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=description)
        try:
            options, unknown = parser.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise SettingsError(str(error)) from error
        if unknown:
            raise SettingsError(
                f"unknown option {unknown[0]}: run `finetune-operator --help` for the options"
            )
        chosen = {_variable_name(name): value for name, value in vars(options).items() if value is not None}
        return cls.from_environment({**environment, **chosen})


def _variable_name(name: str) -> str:
    return f"FINETUNE_{name.upper()}"


_WITH_PASSWORD = re.compile(r"https?://[^/@]*:[^/@]*@", re.IGNORECASE)
_MAY_BE_ZERO = ("FINETUNE_METRICS_PORT", "FINETUNE_POD_USER")
# A shorter Lease leaves no time for a renewal that is late.
_MIN_LEASE_SECONDS = 3
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_SWITCHES = {"true": True, "false": False}
_CHOICES = {
    "FINETUNE_PREP_PULL_POLICY": _PULL_POLICIES,
    "FINETUNE_TRAINER_PULL_POLICY": _PULL_POLICIES,
    "FINETUNE_LOG_LEVEL": ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"),
    "FINETUNE_LOG_FORMAT": ("plain", "json"),
}


def holds_password(uri: str) -> bool:
    """Whether an address contains a password. NB: statuses, Events and logs show addresses."""
    return _WITH_PASSWORD.match(uri) is not None


def _check_text(variable: str, text: str) -> str:
    choices = _CHOICES.get(variable)
    if choices and text not in choices:
        raise SettingsError(f"{variable}={text} is not one of {', '.join(choices)}")
    if holds_password(text):
        raise SettingsError(
            f"{variable} contains a password, which the status of every job would show: remove the password"
        )
    if variable == "FINETUNE_DASHBOARD_URL":
        _check_dashboard(variable, text)
    return text


def _check_dashboard(variable: str, text: str) -> None:
    unknown = set(re.findall(r"\{([^{}]*)\}", text)) - {*DASHBOARD_FIELDS}
    if unknown or not text.startswith(("http://", "https://")):
        placeholders = ", ".join(f"{{{name}}}" for name in DASHBOARD_FIELDS)
        raise SettingsError(
            f"{variable}={text} must be an http or https URL with no other placeholders than {placeholders}"
        )


def _load_defaults(variable: str, path: str) -> Defaults:
    try:
        return load(path, Defaults)
    except InstallationFileError as error:
        raise SettingsError(f"{variable}: {error}") from error


def _describe_default(default: object) -> str:
    if isinstance(default, bool):
        return next(text for text, value in _SWITCHES.items() if value == default)
    return "none" if isinstance(default, Defaults) or not default else str(default)


def _parse_switch(variable: str, text: str) -> bool:
    if text not in _SWITCHES:
        raise SettingsError(f"{variable}={text} is not one of {', '.join(_SWITCHES)}")
    return _SWITCHES[text]


def _parse(variable: str, text: str, default: object) -> object:
    """The value of a variable, in the type of its default."""
    if isinstance(default, Defaults):
        return _load_defaults(variable, text)
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, str):
        return _check_text(variable, text)
    if isinstance(default, bool):
        return _parse_switch(variable, text)
    try:
        value = float(text) if isinstance(default, float) else int(text)
    except ValueError as error:
        kind = "number" if isinstance(default, float) else "whole number"
        raise SettingsError(f"{variable}={text} is not a {kind}") from error
    if not math.isfinite(value):
        raise SettingsError(f"{variable}={text} is not a number")
    if value <= 0 and not (value == 0 and variable in _MAY_BE_ZERO):
        raise SettingsError(f"{variable}={text} must be above 0")
    if variable == "FINETUNE_LEASE_SECONDS" and value < _MIN_LEASE_SECONDS:
        raise SettingsError(f"{variable}={text} must be at least {_MIN_LEASE_SECONDS}")
    return value
