"""Requests to MLflow's REST API, and the meaning of its errors.

https://mlflow.org/docs/latest/api_reference/rest-api.html

MLflow's own client is not used: it follows redirects, reads answers of any size, has no deadline while single bytes keep arriving,
and needs 36 MiB of memory. NB: users name the servers, so no text of an answer may reach a condition or an Event.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.masking import mask
from finetune_operator import metrics
from finetune_operator.bounded import (
    AddressError,
    FencedError,
    Login,
    NoResponseError,
    Response,
    TooLargeError,
    UnsendableError,
    basic_authorization,
    request_in_thread,
)
from finetune_operator.errors import PROTOCOL_CODES, ExternalError, NotSentError, Problem
from finetune_operator.text import shorten

log = logging.getLogger(__name__)

MISSING = "RESOURCE_DOES_NOT_EXIST"
EXISTS = "RESOURCE_ALREADY_EXISTS"

_API = "/api/2.0/mlflow"
# Eight times the size of a run with 1,000 metrics and 500 parameters (about 0.5 MiB).
_MAX_RESPONSE_BYTES = 4 * 2**20
# The longest header that common servers accept. If a header is longer, they close the connection.
_MAX_HEADER_CHARS = 8192
# A value that a header may have, by its characters and its length.
_SENDABLE = re.compile(rf"[^\x00-\x1f\x7f-\x9f\u0100-\U0010ffff]{{0,{_MAX_HEADER_CHARS}}}")
_FORBIDDEN_CODES = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"})
# A retry would fail in the same way: the request itself must change.
_REFUSED_CODES = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST"})
_INVALID_HOST = b"Invalid Host header"


@dataclass(frozen=True)
class Credentials:
    """The login to an MLflow server; all fields are empty without a login."""

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, secret: Mapping[str, str] | None) -> Credentials:
        """The credentials in a Secret, whose keys are the environment variables of MLflow; anonymous without a Secret."""
        values = secret or {}
        return cls(
            username=values.get("MLFLOW_TRACKING_USERNAME", ""),
            password=values.get("MLFLOW_TRACKING_PASSWORD", ""),
            token=values.get("MLFLOW_TRACKING_TOKEN", ""),
        )


ANONYMOUS = Credentials()


class RefusedError(ExternalError):
    """MLflow refused a request.

    Attributes:
        code: MLflow's error code; empty if the answer has no known code.
    """

    def __init__(self, problem: Problem, code: str) -> None:
        super().__init__(problem)
        self.code = code


class LargeAnswerError(ExternalError):
    """The answer is larger than _MAX_RESPONSE_BYTES."""


@dataclass(frozen=True)
class Client:
    """Requests to an MLflow server. Every method blocks: call it outside the event loop."""

    uri: str
    credentials: Credentials = ANONYMOUS

    def get(self, path: str, **fields: str) -> Json:
        """The answer to a GET of a path, such as runs/get.

        Raises:
            RefusedError: MLflow refuses the request, and says why.
            ExternalError: the server cannot be reached, denies access, or is not an MLflow server.
        """
        return self._call("GET", path, query=fields)

    def post(self, path: str, **fields: Any) -> Json:
        """The answer to a POST of fields as JSON.

        Raises:
            RefusedError: MLflow refuses the request, and says why.
            ExternalError: the server cannot be reached, denies access, or is not an MLflow server.
        """
        return self._call("POST", path, body=json.dumps(fields).encode())

    def search(self, path: str, **fields: Any) -> Json:
        """The answer to a search: a POST that writes nothing, so any replica may send it. Errors as in `post`."""
        return self._call("POST", path, body=json.dumps(fields).encode(), is_read=True)

    def delete(self, path: str, **fields: Any) -> Json:
        """The answer to a DELETE of fields as JSON.

        Raises:
            RefusedError: MLflow refuses the request, and says why.
            ExternalError: the server cannot be reached, denies access, or is not an MLflow server.
        """
        return self._call("DELETE", path, body=json.dumps(fields).encode())

    @contextmanager
    def parsing_answer(self) -> Iterator[None]:
        """A context for parsing an answer: JSON in an unexpected format becomes an ExternalError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
            raise self._not_mlflow_error("the response has an unexpected format") from None

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        is_read: bool = False,
    ) -> Json:
        """Send a request, and return the JSON object of the response. Errors as in `post`."""
        headers = {
            "Accept": "application/json",
            "Content-Type": "application/json",
            **self._build_authorization(),
        }
        try:
            url = URL(f"{self.uri.rstrip('/')}{_API}/{path}").with_query(query)
            with metrics.measuring_request("MLflow") as sent:
                response = request_in_thread(
                    method,
                    url,
                    headers=headers,
                    body=body,
                    max_bytes=_MAX_RESPONSE_BYTES,
                    is_read=is_read,
                )
                sent.status = response.status
        except (AddressError, ValueError):
            message = f"{self.uri} is not a valid address of an MLflow server: use an address like http://mlflow:5000"
            raise ExternalError(Problem(ConditionReason.MLFLOW_ERROR, message)) from None
        except UnsendableError:
            message = f"the credentials for MLflow at {self.uri} contain a control character: correct the Secret in spec.tracking.secretRef"
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message)) from None
        except FencedError as error:
            raise NotSentError(
                Problem(ConditionReason.MLFLOW_ERROR, f"MLflow at {self.uri} was not asked: {error}")
            ) from None
        except TooLargeError as error:
            raise LargeAnswerError(self._not_mlflow_error(str(error)).problem) from None
        except NoResponseError as error:
            raise self._unreachable_error(str(error)) from None
        answer = _parse(response.body)
        if response.status != 200:
            raise self._refusal_error(response, answer, path)
        if answer is None:
            raise self._not_mlflow_error("the response is not JSON")
        return answer

    def _build_authorization(self) -> dict[str, str]:
        """The header with the login; empty without a login."""
        credentials = self.credentials
        # NB: a header that HTTP does not allow would make the connection fail, which the operator would treat as an outage for all jobs.
        if not _SENDABLE.fullmatch(credentials.token):
            message = (
                f"the token for MLflow at {self.uri} contains a line break or another character that HTTP does not allow, or is too long: correct "
                "MLFLOW_TRACKING_TOKEN in the Secret in spec.tracking.secretRef"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        if len(b64encode(f"{credentials.username}:{credentials.password}".encode())) > _MAX_HEADER_CHARS:
            message = (
                f"the username and the password for MLflow at {self.uri} are too long: correct MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the Secret in spec.tracking.secretRef"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        if credentials.username and credentials.password:
            if ":" in credentials.username:
                message = (
                    f"the username for MLflow at {self.uri} contains a colon, which HTTP does not allow: correct MLFLOW_TRACKING_USERNAME in "
                    "the Secret in spec.tracking.secretRef"
                )
                raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
            return {"Authorization": basic_authorization(Login(credentials.username, credentials.password))}
        return {"Authorization": f"Bearer {credentials.token}"} if credentials.token else {}

    def _refusal_error(self, response: Response, answer: Json | None, path: str) -> ExternalError:
        """The error for a status other than 200."""
        status, reported_code = response.status, str((answer or {}).get("error_code"))
        code = reported_code if reported_code in PROTOCOL_CODES else ""
        why = f"{code}, HTTP {status}" if code else f"HTTP {status}"
        if status == 403 and _INVALID_HOST in response.body:
            host = self.uri.split("://", 1)[-1].split("/", 1)[0]
            message = (
                f"MLflow at {self.uri} rejects the host name in its own address (403): add '{host}' to its --allowed-hosts "
                "(MLFLOW_SERVER_ALLOWED_HOSTS)"
            )
            return ExternalError(Problem(ConditionReason.MLFLOW_HOST_NOT_ALLOWED, message))
        if status in (401, 403) or code in _FORBIDDEN_CODES:
            message = (
                f"MLflow at {self.uri} refuses access: check the Secret in spec.tracking.secretRef ({why})"
            )
            return ExternalError(Problem(ConditionReason.MLFLOW_FORBIDDEN, message))
        if 300 <= status < 400:
            message = (
                f"MLflow at {self.uri} redirects requests, and the operator does not follow redirects: check whether a login page intercepts "
                f"requests, and use the final address in tracking.uri of the chart, or in a resource with another name ({why})"
            )
            return ExternalError(Problem(ConditionReason.MLFLOW_ERROR, message))
        if status in (429, 502, 503, 504):
            return self._unreachable_error(why)
        if status == 404 and not code:
            return self._not_mlflow_error(why)
        reason = ConditionReason.MLFLOW_REFUSED if code in _REFUSED_CODES else ConditionReason.MLFLOW_ERROR
        if not code:
            message = f"MLflow at {self.uri} failed at {path} ({why}): read the log of the server"
        elif code in (MISSING, EXISTS):
            # The code itself is the reason, and callers expect it.
            message = f"MLflow at {self.uri} refuses {path} ({why})"
        else:
            message = (
                f"MLflow at {self.uri} refuses {path} ({why}): see the log of the operator for the reason"
            )
            self._log_reason(path, why, answer or {})
        return RefusedError(Problem(reason, message), code)

    def _log_reason(self, path: str, why: str, answer: Json) -> None:
        secrets = [secret for secret in (self.credentials.password, self.credentials.token) if secret]
        reason = shorten(mask(str(answer.get("message", "")), secrets))
        log.warning("MLflow at %s refuses %s (%s): %s", self.uri, path, why, reason)

    def _unreachable_error(self, why: str) -> ExternalError:
        message = f"MLflow at {self.uri} cannot be reached: {why}"
        return ExternalError(Problem(ConditionReason.MLFLOW_UNREACHABLE, message))

    def _not_mlflow_error(self, why: str) -> ExternalError:
        message = (
            f"{self.uri} does not respond like an MLflow server: check the address, and whether a login page or a "
            f"proxy intercepts requests ({why})"
        )
        return ExternalError(Problem(ConditionReason.MLFLOW_ERROR, message))


def read_pages(ask: Callable[..., Json], plural: str, *, max_pages: int, **query: Any) -> Iterator[Json]:
    """The objects that a search finds, page by page. Read them in `Client.parsing_answer`.

    NB: a user may name the server, which could answer with pages without end.

    Args:
        ask: sends the query, and returns one page.
        plural: the field of a page with the objects.
        max_pages: the number of pages after which the search ends.
    """
    token = ""
    for _ in range(max_pages):
        page = ask(**query, **({"page_token": token} if token else {}))
        yield from page.get(plural) or []
        token = str(page.get("next_page_token") or "")
        if not token:
            return


def _parse(body: bytes) -> Json | None:
    """The JSON object of an answer; None if the answer is something else. An empty body, which some servers send after writes, gives {}."""
    if not body.strip():
        return {}
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
