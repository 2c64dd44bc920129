"""MLflow as this operator uses it: runs by the job's uid, versions by the run, aliases.

MLflow's own client takes its credentials from the environment of the process; here every job may have its
own. So the stores beneath that client are used, which take credentials for each call.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_crds import contract
from finetune_crds.conditions import Reason
from finetune_operator.model import MlflowProblem, Run, Version

# NB: by default MLflow's client retries for minutes. Here the work queue retries, and a thread must not be held.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

_USER = "finetune-operator"
_ACTIVE_ONLY = 1  # mlflow.entities.ViewType


class TrackingError(Exception):
    """MLflow could not do what was asked; `problem` says why and what to do."""

    def __init__(self, problem: MlflowProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class Credentials:
    """How to log in to an MLflow server; all empty for none."""

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    @classmethod
    def from_secret(cls, data: Mapping[str, str]) -> Credentials:
        """From a Secret's data, with the names that MLflow's own client reads.

        Raises:
            ValueError: a value is no base64 or no text.
        """

        def value(name: str) -> str:
            # NB: files and `echo` end in a line break, which no header may hold.
            return base64.b64decode(data.get(name, "")).decode().strip()

        return cls(
            username=value("MLFLOW_TRACKING_USERNAME"),
            password=value("MLFLOW_TRACKING_PASSWORD"),
            token=value("MLFLOW_TRACKING_TOKEN"),
        )


@dataclass(frozen=True)
class Server:
    """One MLflow server, and how to log in. Every method blocks; call it off the event loop."""

    uri: str
    registry_uri: str
    credentials: Credentials = Credentials()

    def find_run(self, uid: str, experiment: str, run_id: str | None = None) -> Run | None:
        """The run of a job: by its id when that is known, else by the job's uid in its experiment."""
        with self._problems():
            store = self._tracking()
            known = _get_run(store, run_id) if run_id else None
            held = None if known else store.get_experiment_by_name(experiment)
            if known or held is None:
                return known
            wanted = f"tags.`{contract.TAG_JOB_UID}` = '{uid}'"
            found = store.search_runs(
                [held.experiment_id], wanted, _ACTIVE_ONLY, 1, ["attribute.start_time ASC"]
            )
            return _run(found[0]) if found else None

    def ensure_run(self, uid: str, experiment: str, run_name: str, tags: Mapping[str, str]) -> Run:
        """The run of a job, made if there is none."""
        from mlflow.entities import RunTag

        found = self.find_run(uid, experiment)
        if found:
            return found
        with self._problems():
            store = self._tracking()
            every_tag = {**tags, "mlflow.runName": run_name, "mlflow.user": _USER}
            return _run(
                store.create_run(
                    experiment_id=_experiment(store, experiment),
                    user_id=_USER,
                    start_time=int(time.time() * 1000),
                    tags=[RunTag(key, value) for key, value in every_tag.items()],
                    run_name=run_name,
                )
            )

    def finish_run(self, run_id: str, status: str) -> None:
        """Close a run as FINISHED, FAILED or KILLED."""
        from mlflow.entities import RunStatus

        with self._problems():
            self._tracking().update_run_info(
                run_id, RunStatus.from_string(status), int(time.time() * 1000), None
            )

    def find_version(self, model: str, run_id: str, aliases: list[str]) -> Version | None:
        """The version that a run registered, the newest if there are several."""
        with self._problems(registry=True):
            store = self._registry()
            # NB: a model's name may hold quotes, which the filter's grammar cannot.
            found = [
                item
                for item in store.search_model_versions(f"run_id = '{run_id}'")
                if item.name == model and item.status == "READY"
            ]
            if not found:
                return None
            newest = max(found, key=lambda item: int(item.version))
            held = getattr(store.get_registered_model(model), "aliases", {}) or {}
            pointing = {alias for alias in aliases if str(held.get(alias)) == str(newest.version)}
            return Version(model, str(newest.version), frozenset(pointing))

    def set_alias(self, model: str, alias: str, version: str) -> None:
        """Point an alias at a version."""
        with self._problems(registry=True):
            self._registry().set_registered_model_alias(model, alias, version)

    def _problems(self, *, registry: bool = False) -> _problems:
        uri = self.registry_uri if registry else self.uri
        return _problems(uri, (self.credentials.password, self.credentials.token))

    def _tracking(self) -> Any:
        from mlflow.store.tracking.rest_store import RestStore

        return RestStore(lambda: self._host(self.uri))

    def _registry(self) -> Any:
        from mlflow.store.model_registry.rest_store import RestStore

        return RestStore(lambda: self._host(self.registry_uri))

    def _host(self, uri: str) -> Any:
        from mlflow.utils.rest_utils import MlflowHostCreds

        known = self.credentials
        return MlflowHostCreds(
            uri.rstrip("/"),
            username=known.username or None,
            password=known.password or None,
            token=known.token or None,
        )


def _run(found: Any) -> Run:
    info = found.info
    return Run(
        info.run_id, info.experiment_id, str(info.status), dict(found.data.metrics), dict(found.data.tags)
    )


def _get_run(store: Any, run_id: str) -> Run | None:
    from mlflow.exceptions import MlflowException

    try:
        return _run(store.get_run(run_id))
    except MlflowException as error:
        # The server lost it, with its database say.
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _experiment(store: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = store.get_experiment_by_name(name)
    if found is None:
        try:
            return str(store.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = store.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        raise TrackingError(
            MlflowProblem(
                Reason.MLFLOW_ERROR,
                f"experiment {name} was deleted in MLflow: restore it, or set spec.tracking.experiment",
            )
        )
    return str(found.experiment_id)


class _problems:  # noqa: N801
    """Turns whatever MLflow's client raises into a TrackingError with a sentence a person can act on."""

    def __init__(self, uri: str, secrets: tuple[str, ...]) -> None:
        self._uri, self._secrets = uri, [secret for secret in secrets if secret]

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, TrackingError) or not isinstance(error, Exception):
            return
        text = str(error)
        for secret in self._secrets:
            text = text.replace(secret, "***").replace(repr(secret)[1:-1], "***")
        problem = _problem(self._uri, text, str(getattr(error, "error_code", "")))
        # NB: the cause is left out: its text, which a log would show, may hold the credentials.
        raise TrackingError(problem) from None


def _problem(uri: str, text: str, code: str) -> MlflowProblem:
    """What a failure of MLflow's client means, from its text and MLflow's own error code."""
    answered, cause = _STATUS.search(text), _CAUSE.search(text)
    status = int(answered[1]) if answered else None
    why = f"HTTP {status}" if status else cause[0] if cause else _short(text)
    if "Invalid Host header" in text:
        host = uri.split("://", 1)[-1].split("/", 1)[0]
        return MlflowProblem(
            Reason.MLFLOW_HOST_NOT_ALLOWED,
            f"MLflow at {uri} refuses its own host name (403): start it with --allowed-hosts '{host}' "
            "(MLFLOW_SERVER_ALLOWED_HOSTS), beside the names it already has",
        )
    if status in (401, 403) or code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"):
        return MlflowProblem(
            Reason.MLFLOW_FORBIDDEN,
            f"MLflow at {uri} refuses access: check the Secret in spec.tracking.secretRef ({why})",
        )
    if status in (302, 404) or "not in a valid JSON format" in text:
        return MlflowProblem(
            Reason.MLFLOW_ERROR,
            f"{uri} answers, but not as an MLflow server: check the address, and whether a login page or a "
            f"proxy stands before it ({why})",
        )
    if status in (429, 502, 503, 504) or (status is None and "API request to http" in text):
        return MlflowProblem(Reason.MLFLOW_UNREACHABLE, f"MLflow at {uri} cannot be reached: {why}")
    return MlflowProblem(Reason.MLFLOW_ERROR, f"MLflow at {uri} answered: {why}")


# How MLflow's client words the HTTP status of an answer, and of one that it would have retried.
_STATUS = re.compile(r"(?:failed with error code|too many) (\d{3})\b")
# The part of urllib3's nested errors that people can use.
_CAUSE = re.compile(r"\[Errno -?\d+\] [^'\")]+|\[SSL: \w+\] [^'\"(]+|Read timed out")


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
