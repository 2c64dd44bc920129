"""The bounded client as the transport of the Databricks SDK: a deadline for a whole request, a size limit, no redirects.

The SDK is built on requests, whose timeout starts again with every byte and whose responses have no size limit.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from http.client import responses
from typing import Any

import requests
from requests.adapters import BaseAdapter
from requests.structures import CaseInsensitiveDict
from yarl import URL

from finetune_crds.conditions import ConditionReason
from finetune_operator import metrics
from finetune_operator.bounded import (
    FencedError,
    NoResponseError,
    ResponseTimeoutError,
    TooLargeError,
    request_in_thread,
)
from finetune_operator.errors import NotSentError, Problem

# A page of runs or versions is some 100 KiB.
_MAX_RESPONSE_BYTES = 16 * 2**20
MAX_FILE_BYTES = 64 * 2**10
"""Size limit of a file: the operator reads only the progress and the report of a preparation, which take a few KiB."""
_FILES_API = "/api/2.0/fs/files/"
# Headers about the connection and its compression, both of which the bounded client handles.
_CONNECTION_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-encoding", "content-length", "transfer-encoding"}
)


class ResponseTooLargeError(requests.ConnectionError):
    """The response exceeds the size limit."""


class BoundedAdapter(BaseAdapter):
    """Sends the requests of a session through the bounded client."""

    def send(self, request: requests.PreparedRequest, *_: Any, **_options: Any) -> requests.Response:
        """Send a request, and return the response with its body. Options of the session, such as its timeout, are ignored.

        Raises:
            NotSentError: the request writes, and this replica does not hold the Lease of the operator.
            requests.Timeout: no response came in time.
            ResponseTooLargeError: the server sends more than the limit.
            requests.ConnectionError: the server cannot be reached, or redirects.
        """
        body: Any = request.body
        if hasattr(body, "read"):
            body = body.read()
        # NB: requests has already quoted the URL.
        address = URL(request.url or "", encoded=True)
        try:
            with metrics.measuring_request("Databricks") as sent:
                answer = request_in_thread(
                    request.method or "GET",
                    address,
                    headers=_drop_connection_headers(request.headers),
                    body=body.encode() if isinstance(body, str) else body,
                    max_bytes=MAX_FILE_BYTES if address.path.startswith(_FILES_API) else _MAX_RESPONSE_BYTES,
                )
                sent.status = answer.status
        except FencedError as error:
            message = f"Databricks at {address.host} was not asked: {error}"
            raise NotSentError(Problem(ConditionReason.DATABRICKS_ERROR, message)) from None
        except ResponseTimeoutError as error:
            raise requests.Timeout(str(error), request=request) from None
        except TooLargeError as error:
            raise ResponseTooLargeError(str(error), request=request) from None
        except NoResponseError as error:
            raise requests.ConnectionError(str(error), request=request) from None
        if 300 <= answer.status < 400:
            raise requests.ConnectionError(
                f"the server redirects requests, which the operator does not follow (HTTP {answer.status}): use the final address",
                request=request,
            )
        response = requests.Response()
        response.status_code, response.url, response.request = answer.status, request.url or "", request
        response.reason = responses.get(answer.status, "")
        response.headers = CaseInsensitiveDict(_drop_connection_headers(answer.headers))
        response.encoding = requests.utils.get_encoding_from_headers(response.headers)
        response.raw = io.BytesIO(answer.body)
        return response

    def close(self) -> None:
        """Do nothing: each connection is used only once."""


def bind(session: requests.Session) -> requests.Session:
    """Make a session send through the bounded client, and return it."""
    for scheme in ("https://", "http://"):
        session.mount(scheme, BoundedAdapter())
    return session


def _drop_connection_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in headers.items() if name.lower() not in _CONNECTION_HEADERS}
