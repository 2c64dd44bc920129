"""Databricks workspaces: how to log in to one, and what their errors mean.

Credentials come from a Secret, together with the host they are for, or from the installation. Nothing is read from the
environment or from files of the Databricks CLI.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from finetune_crds.conditions import Reason
from finetune_operator.model import MlflowProblem
from finetune_operator.settings import Settings
from finetune_operator.tracking import TrackingError
from finetune_operator.wording import masked, short

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

_NAMES = "DATABRICKS_HOST with DATABRICKS_TOKEN, or DATABRICKS_HOST with DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET"
# Clients hold a token for an hour and open connections; there are as many as there are Secrets in use.
_MAX_CLIENTS = 64


@dataclass(frozen=True)
class Access:
    """A workspace, and one way to log in to it: a token, a client's secret, or a service-account token in exchange."""

    host: str
    token: str = field(default="", repr=False)
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    token_file: str = ""

    @property
    def remedy(self) -> str:
        """What to do when the workspace does not accept it."""
        if self.token_file:
            return (
                "check databricks.clientId of the chart, and the federation policy of its service principal"
            )
        return "check the Secret that secretRef names"

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be shown."""
        return tuple(secret for secret in (self.token, self.client_secret) if secret)


def access(secret: Mapping[str, str] | None, settings: Settings) -> Access:
    """How to log in: by a Secret's data, decoded, or, without one, as the installation.

    NB: the installation's token goes to the installation's host alone. A Secret brings both, or nothing.

    Raises:
        TrackingError: something is missing; the message says what.
    """
    return _installed(settings) if secret is None else _from_secret(secret)


def workspace(secret: Mapping[str, str] | None, settings: Settings) -> WorkspaceClient:
    """A client of the workspace, kept from call to call; it waits at most 10 s for an answer and never tries again.

    Raises:
        TrackingError: something is missing, or the workspace cannot be reached.
    """
    return _clients.get(access(secret, settings))


class problems:  # noqa: N801
    """Turns whatever the SDK raises into a TrackingError with a sentence a person can act on.

    `what` completes "Databricks does not let the operator ...".
    """

    def __init__(self, known: Access | WorkspaceClient, what: str) -> None:
        self._access = known if isinstance(known, Access) else _clients.access(known)
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, TrackingError) or not isinstance(error, Exception):
            return
        _clients.reconsider(self._access, error)
        reason, message = _meaning(error, self._access, self._what)
        # NB: the cause is left out: its text, which a log would show, may hold the credentials.
        raise TrackingError(MlflowProblem(reason, masked(message, self._access.secrets))) from None


class _Clients:
    """The clients in use, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Access, WorkspaceClient] = OrderedDict()

    def get(self, known: Access) -> WorkspaceClient:
        with self._lock:
            held = self._held.get(known)
            if held is not None:
                self._held.move_to_end(known)
                return held
        from finetune_operator.databricks_login import client

        with problems(known, "log in"):
            made = client(known)
        with self._lock:
            self._held[known] = made
            while len(self._held) > _MAX_CLIENTS:
                self._held.popitem(last=False)
        return made

    def access(self, client: WorkspaceClient) -> Access:
        from finetune_operator.databricks_login import Login

        held = client.config
        return held.access if isinstance(held, Login) else Access(held.host)

    def reconsider(self, known: Access, error: Exception) -> None:
        """After an error: forget a client that is of no more use, so that the next call makes another.

        Its token is no longer accepted, or the workspace could not say how it wants to be addressed when it was made.
        """
        from databricks.sdk.errors import Unauthenticated

        with self._lock:
            held = self._held.get(known)
            if held and (isinstance(error, Unauthenticated) or not held.config.discovery_url):
                del self._held[known]


_clients = _Clients()


def _installed(settings: Settings) -> Access:
    if not settings.databricks_host:
        raise _not_configured(
            "no Databricks workspace is known: set secretRef to a Secret with "
            f"{_NAMES}, or install the chart with databricks.host"
        )
    if not settings.databricks_token_file:
        raise _not_configured(
            "the operator has no service-account token for Databricks: install the chart with databricks.tokenAudience"
        )
    return Access(
        host=_checked(settings.databricks_host, "databricks.host of the chart"),
        client_id=settings.databricks_client_id,
        token_file=settings.databricks_token_file,
    )


def _from_secret(secret: Mapping[str, str]) -> Access:
    # NB: files and `echo` end in a line break, which no header may hold.
    values = {name: secret.get(name, "").strip() for name in _SECRET}
    host, token, client_id, client_secret = values.values()
    if not host:
        raise _not_configured(f"the Secret that secretRef names lacks DATABRICKS_HOST: it must have {_NAMES}")
    if bool(token) == bool(client_id or client_secret) or bool(client_id) != bool(client_secret):
        raise _not_configured(f"the Secret that secretRef names must have {_NAMES}")
    return Access(
        host=_checked(host, "DATABRICKS_HOST"), token=token, client_id=client_id, client_secret=client_secret
    )


_SECRET = ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")


def _checked(host: str, where: str) -> str:
    """The address of a workspace: with a scheme, without a slash at its end."""
    full = host if "://" in host else f"https://{host}"
    try:
        parts = urlsplit(full)
        wrong = (
            parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password
        )
    except ValueError:
        wrong = True
    if wrong:
        # NB: it is not shown: it may hold a password.
        raise _not_configured(
            f"{where} is no address of a workspace such as https://example.cloud.databricks.com"
        )
    return f"{parts.scheme}://{parts.netloc.rstrip('/')}"


def _not_configured(message: str) -> TrackingError:
    return TrackingError(MlflowProblem(Reason.DATABRICKS_NOT_CONFIGURED, message))


def _meaning(error: Exception, known: Access, what: str) -> tuple[Reason, str]:
    from databricks.sdk import errors
    from requests import exceptions

    text = short(str(error))
    if isinstance(error, errors.Unauthenticated):
        return Reason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {known.host} does not accept the credentials: {known.remedy} ({text})"
        )
    if isinstance(error, errors.PermissionDenied):
        return Reason.DATABRICKS_FORBIDDEN, (
            f"Databricks at {known.host} does not let the operator {what}: grant it the permission, or use "
            f"other credentials ({text})"
        )
    if isinstance(error, (errors.TooManyRequests, errors.TemporarilyUnavailable, errors.DeadlineExceeded)):
        return Reason.DATABRICKS_UNREACHABLE, f"Databricks at {known.host} is too busy to {what}: {text}"
    if isinstance(error, (exceptions.Timeout, exceptions.ConnectionError)):
        late = isinstance(error, exceptions.Timeout)
        why = "no answer in time" if late else _cause(text)
        return Reason.DATABRICKS_UNREACHABLE, f"Databricks at {known.host} cannot be reached: {why}"
    if isinstance(error, exceptions.JSONDecodeError) or "unable to parse response" in text:
        return Reason.DATABRICKS_ERROR, (
            f"{known.host} answers, but not as a Databricks workspace: check the address, and whether a login page "
            "or a proxy stands before it"
        )
    return Reason.DATABRICKS_ERROR, f"Databricks at {known.host} could not {what}: {text}"


_CAUSE = re.compile(r"\[Errno -?\d+\] [^'\")]+|\[SSL: \w+\] [^'\"(]+|HTTP \d{3} when asked for a token")


def _cause(text: str) -> str:
    """The part of urllib3's nested errors that people can use."""
    found = _CAUSE.search(text)
    return found[0] if found else text
