"""Asks a Prometheus server for one number.

https://prometheus.io/docs/prometheus/latest/querying/api/

NB: users name the servers, so no text of an answer may reach a condition or an Event. Of an answer, only the number does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from yarl import URL

from finetune_crds.conditions import ConditionReason
from finetune_operator import metrics
from finetune_operator.bounded import (
    AddressError,
    NoResponseError,
    TooLargeError,
    UnsendableError,
    request_in_thread,
)
from finetune_operator.errors import ExternalError, Problem

TOKEN = "PROMETHEUS_TOKEN"  # noqa: S105 - the name of a key
"""Key of a Secret with a bearer token."""
# An answer with one number has about 200 bytes, and its labels.
_MAX_RESPONSE_BYTES = 64 * 1024
_NUMBER = re.compile(r"[+-]?([0-9]{1,400}(\.[0-9]{0,400})?([eE][+-]?[0-9]{1,4})?|Inf|NaN)")
_SENDABLE_TOKEN = re.compile(r"[\x21-\x7e]{0,8192}")
_FIELD = "spec.onRegression.prometheus"


@dataclass(frozen=True)
class Prometheus:
    """A server that answers queries as Prometheus does."""

    url: str
    token: str = field(default="", repr=False)

    def read_number(self, query: str) -> float:
        """The result of an instant query. Blocks: call it outside the event loop.

        Raises:
            ExternalError: the server cannot be reached, refuses, or has not exactly one finite number.
        """
        if not _SENDABLE_TOKEN.fullmatch(self.token):
            message = (
                f"the token for Prometheus at {self.url} contains a character that HTTP does not allow, or is too long: correct {TOKEN} in "
                f"the Secret in {_FIELD}.secretRef"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        return self._parse(self._ask(query))

    def _ask(self, query: str) -> bytes:
        headers = {"Accept": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            url = URL(f"{self.url.rstrip('/')}/api/v1/query").with_query({"query": query})
            with metrics.measuring_request("Prometheus") as sent:
                response = request_in_thread("GET", url, headers=headers, max_bytes=_MAX_RESPONSE_BYTES)
                sent.status = response.status
        except (AddressError, UnsendableError, ValueError):
            raise self._error(
                ConditionReason.PROMETHEUS_ERROR, f"has no valid address: correct {_FIELD}.url"
            ) from None
        except TooLargeError as error:
            raise self._error(
                ConditionReason.PROMETHEUS_ERROR, f"did not answer with one number: {error}"
            ) from None
        except NoResponseError as error:
            raise self._error(ConditionReason.PROMETHEUS_UNREACHABLE, f"cannot be reached: {error}") from None
        self._check_status(response.status)
        return response.body

    def _check_status(self, status: int) -> None:
        """Raise an error for a status other than 200."""
        if status == 200:
            return
        if status in (401, 403):
            raise self._error(
                ConditionReason.PROMETHEUS_FORBIDDEN,
                f"refuses access: check the Secret in {_FIELD}.secretRef (HTTP {status})",
            )
        if status in (400, 422):
            raise self._error(
                ConditionReason.PROMETHEUS_ERROR,
                f"cannot evaluate the query: correct {_FIELD}.query (HTTP {status})",
            )
        if status == 429 or status >= 500:
            raise self._error(ConditionReason.PROMETHEUS_UNREACHABLE, f"cannot be reached: HTTP {status}")
        raise self._error(
            ConditionReason.PROMETHEUS_ERROR,
            f"does not respond like a Prometheus server: check {_FIELD}.url, and whether a login page intercepts requests (HTTP {status})",
        )

    def _parse(self, body: bytes) -> float:
        try:
            text = _find_number(json.loads(body))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise self._error(
                ConditionReason.PROMETHEUS_ERROR,
                f"does not respond like a Prometheus server: check {_FIELD}.url",
            ) from None
        number = float(text)
        if not math.isfinite(number):
            raise _inconclusive(f"is {text}, which is not a finite number")
        return number

    def _error(self, reason: ConditionReason, what: str) -> ExternalError:
        return ExternalError(Problem(reason, f"Prometheus at {self.url} {what}"))


def _find_number(answer: Mapping[str, Any]) -> str:
    """The number in an answer, as text.

    Raises:
        ExternalError: the result is not one number.
        ValueError: the answer has an unexpected format; other errors of parsing too.
    """
    data = answer["data"]
    kind, result = data["resultType"], data["result"]
    if kind == "scalar":
        return _check_number(result)
    if kind != "vector":
        raise _inconclusive(
            "is no number but a range or a text: use a query with an instant vector or a scalar"
        )
    if not result:
        raise _inconclusive("has no value: no series matches the query")
    if len(result) > 1:
        raise _inconclusive(f"has {len(result)} values: aggregate the series, for example with sum(...)")
    if "value" not in result[0]:
        raise _inconclusive("is a histogram: use a query with a number, for example histogram_quantile(...)")
    return _check_number(result[0]["value"])


def _check_number(sample: tuple[float, str]) -> str:
    """The value of a sample, if it is a number as Prometheus writes it."""
    _, text = sample
    if not _NUMBER.fullmatch(text):
        raise ValueError("not a number")
    return text


def _inconclusive(what: str) -> ExternalError:
    return ExternalError(Problem(ConditionReason.METRIC_INCONCLUSIVE, f"the result of the query {what}"))
