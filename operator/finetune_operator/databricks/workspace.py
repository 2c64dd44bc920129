"""Databricks workspaces: clients, and the meaning of their errors.

A Secret holds both the host and its credentials; without a Secret, the installation provides them. Nothing is read from
the environment or from files of the Databricks CLI.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.access import Access, access
from finetune_operator.databricks.error_codes import known_code, log_reason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.settings import Settings
from finetune_operator.text import masked, short

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

# A client keeps a token for an hour and open connections. There is one for each Secret in use.
_MAX_CLIENTS = 64


def workspace(secret: Mapping[str, str] | None, settings: Settings) -> WorkspaceClient:
    """A client of the workspace, cached between calls. It waits at most 10 s for a response and never retries.

    Raises:
        ExternalError: something is missing, or the workspace cannot be reached.
    """
    return _clients.get(access(secret, settings))


def bearer(client: WorkspaceClient) -> str:
    """The token that requests of this client carry now; it may request a new one.

    Raises:
        ExternalError: the workspace does not accept the credentials, or cannot be reached.
    """
    with problems(client, "log in"):
        return str(client.config.authenticate()["Authorization"].removeprefix("Bearer "))


def forget(client: WorkspaceClient) -> None:
    """Log in again at the next use: the workspace no longer accepts the client's token."""
    _clients.forget(_clients.access(client))


class problems:  # noqa: N801
    """Turns errors of the SDK into an ExternalError whose message says what to do.

    `what` completes "Databricks does not let the operator ...".
    """

    def __init__(self, credentials: Access | WorkspaceClient, what: str) -> None:
        self._access = credentials if isinstance(credentials, Access) else _clients.access(credentials)
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, ExternalError) or not isinstance(error, Exception):
            return
        _clients.reconsider(self._access, error)
        reason, message = _meaning(error, self._access, self._what)
        log_reason(self._access, self._what, str(error))
        # NB: no cause: a log would show its text, which can hold the credentials.
        raise ExternalError(Problem(reason, masked(message, self._access.secrets))) from None


def told(client: WorkspaceClient, error: Exception, what: str) -> str:
    """Return the error code and the HTTP status of an error of the SDK; its text goes to the log."""
    log_reason(_clients.access(client), what, str(error))
    return _code_and_status(error)


class _Clients:
    """The clients in use, as a least-recently-used cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Access, WorkspaceClient] = OrderedDict()

    def get(self, credentials: Access) -> WorkspaceClient:
        with self._lock:
            cached = self._held.get(credentials)
            if cached is not None:
                self._held.move_to_end(credentials)
                return cached
        from finetune_operator.databricks.login import client

        with problems(credentials, "log in"):
            created = client(credentials)
        with self._lock:
            self._held[credentials] = created
            while len(self._held) > _MAX_CLIENTS:
                self._held.popitem(last=False)
        return created

    def access(self, client: WorkspaceClient) -> Access:
        from finetune_operator.databricks.login import Login

        config = client.config
        return config.access if isinstance(config, Login) else Access(config.host)

    def forget(self, credentials: Access) -> None:
        """Discard a client."""
        with self._lock:
            self._held.pop(credentials, None)

    def reconsider(self, credentials: Access, error: Exception) -> None:
        """After an error, forget a client that no longer works, so that the next call creates another.

        Either its token is no longer accepted, or the workspace did not answer discovery when the client was created.
        """
        from databricks.sdk.errors import Unauthenticated

        with self._lock:
            cached = self._held.get(credentials)
            if cached and (isinstance(error, Unauthenticated) or not cached.config.discovery_url):
                del self._held[credentials]


_clients = _Clients()


def _meaning(error: Exception, credentials: Access, what: str) -> tuple[ConditionReason, str]:
    from databricks.sdk import errors
    from requests import exceptions

    text, why = short(str(error)), _code_and_status(error)
    if isinstance(error, errors.Unauthenticated):
        return ConditionReason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {credentials.host} does not accept the credentials: {credentials.remedy} ({why})"
        )
    if isinstance(error, errors.PermissionDenied):
        return ConditionReason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {credentials.host} does not let the operator {what}: grant it the permission, or use "
            f"other credentials ({why})"
        )
    if isinstance(error, (errors.TooManyRequests, errors.TemporarilyUnavailable, errors.DeadlineExceeded)):
        return (
            ConditionReason.DATABRICKS_UNREACHABLE,
            f"Databricks at {credentials.host} is too busy to {what}: {why}",
        )
    if isinstance(error, (exceptions.Timeout, exceptions.ConnectionError)):
        late = isinstance(error, exceptions.Timeout)
        why = "no answer in time" if late else _cause(text)
        return (
            ConditionReason.DATABRICKS_UNREACHABLE,
            f"Databricks at {credentials.host} cannot be reached: {why}",
        )
    if isinstance(error, exceptions.JSONDecodeError) or "unable to parse response" in text:
        return ConditionReason.DATABRICKS_ERROR, (
            f"{credentials.host} answers, but not as a Databricks workspace: check the address, and whether a login page "
            "or a proxy stands before it"
        )
    return (
        ConditionReason.DATABRICKS_ERROR,
        f"Databricks at {credentials.host} could not {what} ({why}): the log of the operator has the reason",
    )


def _code_and_status(error: Exception) -> str:
    from databricks.sdk.errors.base import DatabricksError
    from databricks.sdk.errors.platform import STATUS_CODE_MAPPING

    if not isinstance(error, DatabricksError):
        return type(error).__name__
    status = next((code for code, kind in STATUS_CODE_MAPPING.items() if isinstance(error, kind)), None)
    parts = (known_code(error.error_code), f"HTTP {status}" if status else "")
    return ", ".join(part for part in parts if part) or "unknown error"


_CAUSE = re.compile(
    r"\[Errno -?\d+\] [^'\")]+|\[SSL: \w+\] [^'\"(]+|HTTP \d{3} when asked for a token|"
    r"no connection can be made|its certificate is not trusted|its address is not valid|the connection was closed|"
    r"its answer is larger than \d+ bytes|the request failed \(\w+\)|a header has a control character|"
    r"it is at another address, and redirects are not followed \(HTTP \d{3}\)|no JSON object when asked for a token"
)


def _cause(text: str) -> str:
    """The useful part of urllib3's nested errors."""
    match = _CAUSE.search(text)
    return match[0] if match else "no connection can be made"
