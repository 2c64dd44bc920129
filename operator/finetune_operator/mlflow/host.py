"""An MLflow server: its address, the credentials, and the meaning of its errors.

MLflow's own client takes its credentials from the environment of the process; here every resource may have its
own. So this module uses the stores below that client, which take credentials for each call.
"""

from __future__ import annotations

import os
import re
import threading
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.text import masked, short

# NB: by default MLflow's client retries for minutes. Here the work queue retries, and must not block a thread.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

_IMPORTING = threading.Lock()


@dataclass(frozen=True)
class Credentials:
    """How to log in to an MLflow server; all empty for none."""

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, secret: Mapping[str, str] | None) -> Credentials:
        """From the keys of a Secret, named as MLflow's client reads them; without a Secret, anonymous."""
        held = secret or {}
        return cls(
            username=held.get("MLFLOW_TRACKING_USERNAME", ""),
            password=held.get("MLFLOW_TRACKING_PASSWORD", ""),
            token=held.get("MLFLOW_TRACKING_TOKEN", ""),
        )


ANONYMOUS = Credentials()


@dataclass(frozen=True)
class Host:
    """An MLflow server and its credentials."""

    uri: str
    credentials: Credentials = ANONYMOUS

    def tracking(self) -> Any:
        """MLflow's store of runs."""
        from mlflow.store.tracking.rest_store import RestStore

        return RestStore(self._access)

    def registry(self) -> Any:
        """MLflow's store of registered models."""
        from mlflow.store.model_registry.rest_store import RestStore

        return RestStore(self._access)

    def problems(self) -> Problems:
        """A context in which errors of MLflow's client become an ExternalError."""
        return Problems(self.uri, (self.credentials.password, self.credentials.token))

    def _access(self) -> Any:
        from mlflow.utils.rest_utils import MlflowHostCreds

        known = self.credentials
        # NB: the client would say that the server cannot be reached, and the operator would ask it for no job of any namespace.
        if not _SENDABLE.fullmatch(known.token):
            message = (
                f"the token for MLflow at {self.uri} has a line break or a character that cannot be sent, or is too long: correct "
                "MLFLOW_TRACKING_TOKEN in the Secret in spec.tracking.secretRef"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        if len(b64encode(f"{known.username}:{known.password}".encode())) > _LONGEST:
            message = (
                f"the username and the password for MLflow at {self.uri} are too long: correct MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the Secret in spec.tracking.secretRef"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        return MlflowHostCreds(
            self.uri.rstrip("/"),
            username=known.username or None,
            password=known.password or None,
            token=known.token or None,
        )


class Problems:
    """Turns errors of MLflow's client into an ExternalError whose message says what to do.

    NB: MLflow is imported in these contexts only. Two threads that import different parts of it for the first time leave
    it broken until the process ends.
    """

    def __init__(self, uri: str, secrets: tuple[str, ...]) -> None:
        self._uri, self._secrets = uri, [secret for secret in secrets if secret]

    def __enter__(self) -> None:
        with _IMPORTING:
            import mlflow.store.model_registry.rest_store
            import mlflow.store.tracking.rest_store  # noqa: F401

            import finetune_operator.mlflow.connections  # noqa: F401

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, ExternalError) or not isinstance(error, Exception):
            return
        text = masked(str(error), self._secrets)
        problem = _problem(self._uri, text, str(getattr(error, "error_code", "")))
        # NB: no cause: a log would show its text, which can hold the credentials.
        raise ExternalError(problem) from None


def _problem(uri: str, text: str, code: str) -> Problem:
    """The meaning of an error of MLflow's client, from its text and MLflow's error code."""
    answered, cause = _STATUS.search(text), _CAUSE.search(text)
    status = int(answered[1]) if answered else None
    why = f"HTTP {status}" if status else cause[0] if cause else short(text)
    if text.startswith("Invalid url:"):
        return Problem(
            ConditionReason.MLFLOW_ERROR,
            f"{uri} is not the address of an MLflow server: use one such as http://mlflow:5000",
        )
    if "Invalid Host header" in text:
        host = uri.split("://", 1)[-1].split("/", 1)[0]
        return Problem(
            ConditionReason.MLFLOW_HOST_NOT_ALLOWED,
            f"MLflow at {uri} refuses its own host name (403): start it with --allowed-hosts '{host}' "
            "(MLFLOW_SERVER_ALLOWED_HOSTS), beside the names it already has",
        )
    if status in (401, 403) or code in ("PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"):
        return Problem(
            ConditionReason.MLFLOW_FORBIDDEN,
            f"MLflow at {uri} refuses access: check the Secret in spec.tracking.secretRef ({why})",
        )
    if status in (302, 404) or "not in a valid JSON format" in text:
        return Problem(
            ConditionReason.MLFLOW_ERROR,
            f"{uri} answers, but not as an MLflow server: check the address, and whether a login page or a "
            f"proxy stands before it ({why})",
        )
    if status in (429, 502, 503, 504) or (status is None and "API request to http" in text):
        return Problem(ConditionReason.MLFLOW_UNREACHABLE, f"MLflow at {uri} cannot be reached: {why}")
    # A retry would fail in the same way: the request itself must change.
    refused = code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
    reason = ConditionReason.MLFLOW_REFUSED if refused else ConditionReason.MLFLOW_ERROR
    return Problem(reason, f"MLflow at {uri} answered: {why}")


# What a header takes, and servers: they close the connection where one is too long.
_LONGEST = 8192
_SENDABLE = re.compile(rf"[^\r\n\u0100-\U0010ffff]{{0,{_LONGEST}}}")
# How MLflow's client reports the HTTP status of a response, also after its retries.
_STATUS = re.compile(r"(?:failed with error code|too many) (\d{3})\b")
# The useful part of urllib3's nested errors.
_CAUSE = re.compile(
    r"\[Errno -?\d+\] [^'\")]+|\[SSL: \w+\] [^'\"(]+|Read timed out|Connection to [\w.-]+ timed out"
    r"|Connection reset by peer|Remote end closed connection without response"
)
