"""Log in with the Databricks SDK and explicit credentials. Imported only when a workspace is used."""

from __future__ import annotations

import logging
import re
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import requests
from databricks.sdk import WorkspaceClient
from databricks.sdk._base_client import _BaseClient
from databricks.sdk.clock import Clock
from databricks.sdk.config import Config
from databricks.sdk.credentials_provider import CredentialsStrategy, OAuthCredentialsProvider
from databricks.sdk.oauth import IgnoreNetrcAuth, Refreshable, Token, get_host_metadata
from yarl import URL

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.access import Access
from finetune_operator.databricks.error_codes import log_reason, recognize_code
from finetune_operator.databricks.transport import bind
from finetune_operator.errors import ExternalError, Problem

_JWT = "urn:ietf:params:oauth:token-type:jwt"
_ACCOUNT_HOST = re.compile(r"accounts\.([a-z0-9-]+\.)?databricks\.com")
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
# Lifetime of a token whose response does not state it.
_DEFAULT_TOKEN_SECONDS = 3600

# NB: the SDK logs warnings on every attempt, and request bodies at level DEBUG.
logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
# NB: the SDK collects the attributes once, from the first class that is used, so use Config before its subclass Login.
Config.attributes()


def create_client(access: Access) -> WorkspaceClient:
    """A client with these credentials.

    Raises:
        ValueError: the SDK does not accept the configuration.
    """
    workspace = WorkspaceClient(config=Login(access))
    bind(workspace.api_client._api_client._session)  # noqa: SLF001 - the SDK takes no session
    return workspace


class Login(Config):
    """The SDK's configuration from explicit values only. By default the SDK also reads the environment and files."""

    def __init__(self, access: Access) -> None:
        self.access = access
        credentials: dict[str, Any] = (
            {"token": access.token, "auth_type": "pat"}
            if access.token
            else {"credentials_strategy": _OAuth(access)}
        )
        super().__init__(
            host=access.host,
            product="finetune-operator",
            retry_timeout_seconds=1,
            clock=_OneAttempt(),
            # NB: the experimental client sends files through sessions of its own, which are not bounded.
            disable_experimental_files_api_client=True,
            **credentials,
        )

    def _load_from_env(self) -> None:
        """Reads nothing: the environment is the operator's, but the credentials may be a user's."""

    def _known_file_config_loader(self) -> None:
        """Reads nothing, for the same reason."""

    def _resolve_host_metadata(self) -> None:
        """Read the workspace's ids and the address for logins. Without a valid answer, `_Tokens` uses the usual address of a workspace."""
        session = _BaseClient(retry_timeout_seconds=self.retry_timeout_seconds, clock=self.clock)
        bind(session._session)  # noqa: SLF001 - the SDK takes no session
        try:
            metadata = get_host_metadata(self.host, client=session)
        except (AttributeError, LookupError, TypeError, ValueError):
            return
        self.account_id = self.account_id or _as_text(metadata.account_id)
        self.workspace_id = self.workspace_id or _as_text(metadata.workspace_id)
        # For example https://accounts.cloud.databricks.com/oidc/accounts/{account_id}.
        endpoint = _as_text(metadata.oidc_endpoint).replace("{account_id}", self.account_id or "").rstrip("/")
        discovery_url = _check_login_url(self.host, f"{endpoint}/.well-known/oauth-authorization-server")
        if endpoint and discovery_url and not self.discovery_url:
            self.discovery_url = discovery_url

    def wrap_debug_info(self, message: str) -> str:
        """The message alone: people who read a status must not see the configuration."""
        return message


class _OneAttempt(Clock):
    """Ends the SDK's retries at the first error, since the work queue retries. The SDK sleeps only before a retry."""

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> NoReturn:
        error = sys.exception()
        raise error or TimeoutError(f"not waiting for {seconds} s")


class _OAuth(CredentialsStrategy):
    """Logs in with a client secret or a service-account token."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def auth_type(self) -> str:
        return "file-oidc" if self._access.token_file else "oauth-m2m"

    def __call__(self, cfg: Config) -> OAuthCredentialsProvider:
        tokens = _Tokens(self._access, cfg)

        def headers() -> dict[str, str]:
            token = tokens.token()
            return {"Authorization": f"{token.token_type} {token.access_token}"}

        return OAuthCredentialsProvider(headers, tokens.token)


class _Tokens(Refreshable):
    """Tokens of the workspace; when a token expires, a new token is requested.

    NB: the SDK's own token sources do not use the bounded client, and send the secret to the target of a redirect.
    """

    def __init__(self, access: Access, cfg: Config) -> None:
        super().__init__(disable_async=True)
        self._access, self._cfg = access, cfg

    def refresh(self) -> Token:
        endpoint = self._find_endpoint()
        form, auth = self._build_request()
        with bind(requests.Session()) as session:
            answer = session.post(endpoint, form, auth=auth)
        if answer.status_code in (400, 401, 403):
            raise ExternalError(Problem(ConditionReason.DATABRICKS_FORBIDDEN, self._describe_refusal(answer)))
        body = _parse_json(answer)
        return Token(
            access_token=body["access_token"],
            token_type=body.get("token_type") or "Bearer",
            expiry=datetime.now() + timedelta(seconds=int(body.get("expires_in") or _DEFAULT_TOKEN_SECONDS)),  # noqa: DTZ005 - naive, as in the SDK
        )

    def _find_endpoint(self) -> str:
        """The address for requests for tokens, which the workspace names in its discovery document."""
        discovery_url = (
            self._cfg.discovery_url or f"{self._access.host}/oidc/.well-known/oauth-authorization-server"
        )
        with bind(requests.Session()) as session:
            answer = session.get(discovery_url, auth=IgnoreNetrcAuth())
        endpoint = _check_login_url(self._access.host, _parse_json(answer).get("token_endpoint"))
        if not endpoint:
            message = (
                f"Databricks at {self._access.host} names a token endpoint at another address, or none: set the host to the "
                "workspace's own address"
            )
            raise ExternalError(Problem(ConditionReason.DATABRICKS_ERROR, message))
        return endpoint

    def _build_request(self) -> tuple[dict[str, str], Any]:
        """The form of a request for a token, and the authentication of the request."""
        access = self._access
        if not access.token_file:
            basic = requests.auth.HTTPBasicAuth(access.client_id, access.client_secret)
            return {"grant_type": "client_credentials", "scope": "all-apis"}, basic
        form = {
            "grant_type": _EXCHANGE,
            "scope": "all-apis",
            "subject_token_type": _JWT,
            "subject_token": _read_token_file(access.token_file),
        }
        if access.client_id:
            form["client_id"] = access.client_id
        return form, IgnoreNetrcAuth()

    def _describe_refusal(self, answer: requests.Response) -> str:
        try:
            code = recognize_code(answer.json()["error"])
        except (LookupError, TypeError, ValueError):
            code = ""
        log_reason(self._access, "log in", answer.text)
        status = f"HTTP {answer.status_code}"
        why = f"{code}, {status}" if code else status
        host, remedy = self._access.host, self._access.remedy
        return f"Databricks at {host} rejected the credentials: {remedy} ({why})"


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _check_login_url(host: str | None, address: object) -> str | None:
    """The address for logins that a workspace names; None unless it is on the workspace's own host or a Databricks account host.

    NB: a user names the workspace. Without this check, its answer could direct requests to servers that only the operator reaches.
    """
    try:
        url, workspace = URL(_as_text(address)), URL(host or "")
        if url.user is not None or url.password is not None:
            return None
        is_account = url.scheme == "https" and url.port == 443 and _ACCOUNT_HOST.fullmatch(url.host or "")
        return str(url) if is_account or url.origin() == workspace.origin() else None
    except ValueError:
        return None


def _parse_json(answer: requests.Response) -> dict[str, Any]:
    """The body of a response of the token endpoint or of its discovery, as a JSON object.

    Raises:
        requests.ConnectionError: the status is not 200, or the body is JSON but no object.
        requests.JSONDecodeError: the body is not JSON.
    """
    if answer.status_code != 200:
        raise requests.ConnectionError(f"HTTP {answer.status_code} from the token endpoint")
    body = answer.json()
    if not isinstance(body, dict):
        raise requests.ConnectionError("no JSON object from the token endpoint")
    return body


def _read_token_file(path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise _token_error(f"cannot be read: {error.__class__.__name__}") from None
    if not text:
        raise _token_error("is empty")
    return text


def _token_error(why: str) -> ExternalError:
    return ExternalError(
        Problem(
            ConditionReason.DATABRICKS_NOT_CONFIGURED,
            f"the operator's service-account token for Databricks {why}: install the chart with "
            "databricks.tokenAudience",
        )
    )
