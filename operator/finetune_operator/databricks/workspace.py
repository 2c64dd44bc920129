"""Databricks workspaces: clients, and the meaning of their errors.

A Secret contains both the host and its credentials; without a Secret, both come from the values of the chart. Nothing is read
from the environment or from files of the Databricks CLI.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from finetune_crds.conditions import ConditionReason
from finetune_crds.masking import mask, mask_recognized
from finetune_operator.databricks.access import Access, resolve_access
from finetune_operator.databricks.error_codes import log_reason, recognize_code
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.settings import Settings
from finetune_operator.text import shorten

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

# Each Secret in use has one client, which keeps its token.
_MAX_CLIENTS = 64
# The causes that a message may show: errors of sockets and of TLS, and texts of the operator's own clients.
_CAUSE = re.compile(
    r"\[Errno -?\d+\] [^'\")]+|\[SSL: \w+\] [^'\"(]+|HTTP \d{3} from the token endpoint|"
    r"the connection failed|its certificate is not trusted|its address is not valid|the connection was closed|"
    r"the response is larger than \d+ bytes|the request failed \(\w+\)|a header contains a control character|"
    r"the server redirects requests, which the operator does not follow \(HTTP \d{3}\): use the final address|no JSON object from the token endpoint"
)


def open_workspace(secret: Mapping[str, str] | None, settings: Settings) -> WorkspaceClient:
    """A client of the workspace, cached between calls. It waits at most 10 s for a response and never retries.

    Raises:
        ExternalError: a credential or a setting is missing, or the workspace cannot be reached.
    """
    return _clients.get(resolve_access(secret, settings))


def get_bearer_token(client: WorkspaceClient) -> str:
    """Return the token that this client sends now; the call may request a new token.

    Raises:
        ExternalError: the workspace does not accept the credentials, or cannot be reached.
    """
    with translate_errors(client, "log in"):
        return str(client.config.authenticate()["Authorization"].removeprefix("Bearer "))


def forget(client: WorkspaceClient) -> None:
    """Log in again at the next use: the workspace no longer accepts the client's token."""
    _clients.forget(_clients.access(client))


class translate_errors:  # noqa: N801
    """Turns errors of the SDK into an ExternalError whose message has the remedy.

    `what` completes "Databricks denied the operator permission to ...".
    """

    def __init__(self, credentials: Access | WorkspaceClient, what: str) -> None:
        self._access = credentials if isinstance(credentials, Access) else _clients.access(credentials)
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        # An ExternalError is already translated, and an interruption, such as CancelledError, is no Exception.
        if not isinstance(error, Exception) or isinstance(error, ExternalError):
            return
        _clients.reconsider(self._access, error)
        reason, message = _classify_error(error, self._access, self._what)
        log_reason(self._access, self._what, str(error))
        # NB: not `from error`: a log would show the text of the cause, which may contain the credentials.
        raise ExternalError(Problem(reason, message)) from None


def log_error(client: WorkspaceClient, error: Exception, what: str) -> str:
    """Log the text of an error of the SDK, and return its error code and HTTP status."""
    log_reason(_clients.access(client), what, str(error))
    return _describe_code(error)


def mask_credentials(client: WorkspaceClient, text: str) -> str:
    """A text that the workspace sends, such as the error of a run, without credentials."""
    return mask(mask_recognized(text), _clients.access(client).secrets)


class _Clients:
    """The clients in use, as a least-recently-used cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[Access, WorkspaceClient] = OrderedDict()

    def get(self, credentials: Access) -> WorkspaceClient:
        """A client with these credentials, from the cache or a new one."""
        with self._lock:
            cached = self._cached.get(credentials)
            if cached is not None:
                self._cached.move_to_end(credentials)
                return cached
        from finetune_operator.databricks.login import create_client

        # NB: the lock is not held here, since the creation of a client sends requests.
        with translate_errors(credentials, "log in"):
            created = create_client(credentials)
        with self._lock:
            self._cached[credentials] = created
            while len(self._cached) > _MAX_CLIENTS:
                self._cached.popitem(last=False)
        return created

    def access(self, client: WorkspaceClient) -> Access:
        """The credentials of a client."""
        from finetune_operator.databricks.login import Login

        config = client.config
        return config.access if isinstance(config, Login) else Access(config.host)

    def forget(self, credentials: Access) -> None:
        """Discard a client."""
        with self._lock:
            self._cached.pop(credentials, None)

    def reconsider(self, credentials: Access, error: Exception) -> None:
        """After an error, discard a client that cannot work, so that the next call creates another.

        Either its token is no longer accepted, or the workspace did not answer discovery (`discovery_url`) when the client was created.
        """
        from databricks.sdk.errors import Unauthenticated

        with self._lock:
            cached = self._cached.get(credentials)
            if cached and (isinstance(error, Unauthenticated) or not cached.config.discovery_url):
                del self._cached[credentials]


_clients = _Clients()


def _classify_error(error: Exception, credentials: Access, what: str) -> tuple[ConditionReason, str]:
    """The reason of a condition for an error of the SDK, and the message. `what`: the operation that failed, as an infinitive."""
    from databricks.sdk import errors
    from requests import exceptions

    text, why = shorten(str(error)), _describe_code(error)
    if isinstance(error, errors.Unauthenticated):
        return ConditionReason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {credentials.host} rejected the credentials: {credentials.remedy} ({why})"
        )
    if isinstance(error, errors.PermissionDenied):
        return ConditionReason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {credentials.host} denied the operator permission to {what}: grant the permission, or use "
            f"other credentials ({why})"
        )
    if isinstance(error, (errors.TooManyRequests, errors.TemporarilyUnavailable, errors.DeadlineExceeded)):
        return (
            ConditionReason.DATABRICKS_UNREACHABLE,
            f"Databricks at {credentials.host} is too busy to {what}: {why}",
        )
    if isinstance(error, (exceptions.Timeout, exceptions.ConnectionError)):
        timed_out = isinstance(error, exceptions.Timeout)
        # NB: only text of others is masked, and only now: a token such as "e" must change no other word of the message.
        why = "the request timed out" if timed_out else mask(_find_cause(text), credentials.secrets)
        return (
            ConditionReason.DATABRICKS_UNREACHABLE,
            f"Databricks at {credentials.host} cannot be reached: {why}",
        )
    if isinstance(error, exceptions.JSONDecodeError) or "unable to parse response" in text:
        return ConditionReason.DATABRICKS_ERROR, (
            f"{credentials.host} does not respond like a Databricks workspace: check the address, and whether a login page "
            "or a proxy intercepts requests"
        )
    return (
        ConditionReason.DATABRICKS_ERROR,
        f"Databricks at {credentials.host} failed to {what} ({why}): see the log of the operator for the reason",
    )


def _describe_code(error: Exception) -> str:
    from databricks.sdk.errors.base import DatabricksError
    from databricks.sdk.errors.platform import STATUS_CODE_MAPPING

    if not isinstance(error, DatabricksError):
        return type(error).__name__
    # For example "PERMISSION_DENIED, HTTP 403".
    status = next((code for code, kind in STATUS_CODE_MAPPING.items() if isinstance(error, kind)), None)
    parts = (recognize_code(error.error_code), f"HTTP {status}" if status else "")
    return ", ".join(part for part in parts if part) or "unknown error"


def _find_cause(text: str) -> str:
    """The useful part of a nested connection error."""
    match = _CAUSE.search(text)
    return match[0] if match else "the connection failed"
