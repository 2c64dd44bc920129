"""The credentials for a Databricks workspace: from a Secret, or from the values of the chart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from finetune_crds.conditions import ConditionReason
from finetune_crds.databricks import SECRET_KEYS
from finetune_crds.env import LocalReference
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.settings import Settings
from finetune_operator.text import normalize_address

_REQUIRED_KEYS = "DATABRICKS_HOST with DATABRICKS_TOKEN, or DATABRICKS_HOST with DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET"


@dataclass(frozen=True)
class Access:
    """A workspace's address and one kind of credentials: a token, a client secret, or a service-account token to exchange."""

    host: str
    token: str = field(default="", repr=False)
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    token_file: str = ""

    @property
    def remedy(self) -> str:
        """The remedy if the workspace does not accept the credentials."""
        if self.token_file:
            return (
                "check databricks.clientId of the chart, and the federation policy of its service principal"
            )
        return "check the Secret that secretRef names"

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that no message may show."""
        return tuple(secret for secret in (self.token, self.client_secret) if secret)


def resolve_access(secret: Mapping[str, str] | None, settings: Settings) -> Access:
    """Return the credentials from a Secret's decoded data or, without a Secret, from the values of the chart.

    NB: the operator's token is sent only to the chart's host, so a Secret must have both host and credentials.

    Raises:
        ExternalError: a key is missing; the message names the key.
    """
    return _read_settings(settings) if secret is None else _read_secret(secret)


def find_named_login(spec: FineTuneJobSpec, settings: Settings) -> LocalReference | None:
    """Return the Secret that a spec names, always as required: if an optional Secret were missing, the run would use the chart's login."""
    secret = spec.databricks.secret_ref if spec.databricks else None
    if secret is None and settings.on_databricks(spec.tracking):
        secret = spec.tracking.secret_ref
    return secret.model_copy(update={"optional": False}) if secret else None


def find_workspace(settings: Settings, secret: Mapping[str, str] | None) -> str:
    """Return the workspace address from a Secret or, without a Secret, from the chart; the same workspace gives the same text.

    Raises:
        ExternalError: no workspace is known, or the Secret is incomplete.
    """
    return resolve_access(secret, settings).host


def _read_settings(settings: Settings) -> Access:
    if not settings.databricks_host:
        raise _not_configured(
            "no Databricks workspace is configured: install the chart with databricks.host, or set secretRef to a Secret with "
            f"{_REQUIRED_KEYS}; for a FineTuneJob, whose secretRef cannot change, create a job with another name"
        )
    if not settings.databricks_token_file:
        raise _not_configured(
            "the operator has no service-account token for Databricks: install the chart with databricks.tokenAudience"
        )
    return Access(
        host=_normalize_host(settings.databricks_host, "databricks.host of the chart"),
        client_id=settings.databricks_client_id,
        token_file=settings.databricks_token_file,
    )


def _read_secret(secret: Mapping[str, str]) -> Access:
    """The login in a Secret, which must contain either a token or a client id and its secret."""
    # NB: values from files and `echo` end in a line break, which a header must not contain.
    values = {key: secret.get(key, "").strip() for key in SECRET_KEYS}
    host, token = values["DATABRICKS_HOST"], values["DATABRICKS_TOKEN"]
    client_id, client_secret = values["DATABRICKS_CLIENT_ID"], values["DATABRICKS_CLIENT_SECRET"]
    if not host:
        raise _not_configured(
            f"the Secret that secretRef names lacks DATABRICKS_HOST: it must have {_REQUIRED_KEYS}"
        )
    if token and (client_id or client_secret):
        raise _not_configured(
            "the Secret that secretRef names has both DATABRICKS_TOKEN and a DATABRICKS_CLIENT_ID or DATABRICKS_CLIENT_SECRET: remove "
            "one of the logins"
        )
    if not token and not (client_id and client_secret):
        raise _not_configured(f"the Secret that secretRef names must have {_REQUIRED_KEYS}")
    return Access(
        host=_normalize_host(host, "DATABRICKS_HOST"),
        token=token,
        client_id=client_id,
        client_secret=client_secret,
    )


def _normalize_host(host: str, where: str) -> str:
    """The address of a workspace, with a scheme and in one spelling.

    NB: an address with a path or a query, as a browser shows it, is refused. Pods get the address as it is, and their requests would fail.
    """
    full = host if "://" in host else f"https://{host}"
    try:
        parts = urlsplit(full)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
        is_invalid = not is_server or parts.username or parts.password or parts.query or parts.fragment
    except ValueError:
        is_invalid = True
    if is_invalid:
        # NB: the message does not show the host, which may contain a password.
        raise _not_configured(
            f"{where} is not a workspace address: use an address like https://example.cloud.databricks.com, without a path or a query"
        )
    return normalize_address(full)


def _not_configured(message: str) -> ExternalError:
    return ExternalError(Problem(ConditionReason.DATABRICKS_NOT_CONFIGURED, message))
