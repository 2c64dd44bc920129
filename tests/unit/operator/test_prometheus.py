"""The number that a server answers to a query, and every answer that is no number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError
from finetune_operator.prometheus import Prometheus
from support.http_server import Answer, NoAnswerError, Request, serving

SECRET = "what only this server knows"


def vector(*values: str) -> Answer:
    """An answer with these samples."""
    result = [
        {"metric": {"job": SECRET, "i": str(n)}, "value": [1.5, value]} for n, value in enumerate(values)
    ]
    return answer("vector", result)


def answer(kind: str, result: Any, **others: Any) -> Answer:
    return Answer(200, {"status": "success", "data": {"resultType": kind, "result": result}, **others})


@contextmanager
def prometheus(reply: Answer | None) -> Iterator[tuple[str, list[Request]]]:
    """A server that answers every request so (None: not at all); its address and its requests."""
    requests: list[Request] = []

    def respond(request: Request) -> Answer:
        requests.append(request)
        if reply is None:
            raise NoAnswerError
        return reply

    with serving(respond) as url:
        yield url, requests


NUMBERS: dict[str, tuple[Answer, float]] = {
    "a vector": (vector("0.25"), 0.25),
    "a scalar": (answer("scalar", [1.5, "3"]), 3.0),
    "a small number": (vector("1.5e-07"), 1.5e-07),
    "a negative number": (vector("-2"), -2.0),
    "warnings of the server": (
        answer("vector", [{"metric": {}, "value": [1.5, "1"]}], warnings=[SECRET], infos=[SECRET]),
        1.0,
    ),
}


@pytest.mark.parametrize(("reply", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_a_number(reply: Answer, expected: float) -> None:
    with prometheus(reply) as (url, requests):
        number = Prometheus(f"{url}/base/", "t0ken").read_number('sum(rate(e{a="b&c"}[1m])) + 1')
    assert number == expected
    request = requests[0]
    assert (request.method, request.target) == (
        "GET",
        "/base/api/v1/query?query=sum(rate(e%7Ba%3D%22b%26c%22%7D%5B1m%5D))+%2B+1",
    )
    assert request.headers["Authorization"] == "Bearer t0ken"


def test_without_a_token_no_login_is_sent() -> None:
    with prometheus(vector("1")) as (url, requests):
        Prometheus(url).read_number("up")
    assert requests[0].headers["Authorization"] is None


class Refusal(NamedTuple):
    """The reason and the message; URL stands for the address."""

    reason: ConditionReason
    message: str


RESULT = "the result of the query "
NOT_PROMETHEUS = (
    "Prometheus at URL does not respond like a Prometheus server: check spec.onRegression.prometheus.url"
)
INCONCLUSIVE, ERROR = ConditionReason.METRIC_INCONCLUSIVE, ConditionReason.PROMETHEUS_ERROR
UNREACHABLE = ConditionReason.PROMETHEUS_UNREACHABLE
PROBLEMS: dict[str, tuple[Answer | None, Refusal]] = {
    "no series": (vector(), Refusal(INCONCLUSIVE, f"{RESULT}has no value: no series matches the query")),
    "several series": (
        vector("1", "2"),
        Refusal(INCONCLUSIVE, f"{RESULT}has 2 values: aggregate the series, for example with sum(...)"),
    ),
    "NaN": (vector("NaN"), Refusal(INCONCLUSIVE, f"{RESULT}is NaN, which is not a finite number")),
    "infinite": (vector("+Inf"), Refusal(INCONCLUSIVE, f"{RESULT}is +Inf, which is not a finite number")),
    "too large for a float": (
        vector("1e999"),
        Refusal(INCONCLUSIVE, f"{RESULT}is 1e999, which is not a finite number"),
    ),
    "a range": (
        answer("matrix", []),
        Refusal(
            INCONCLUSIVE,
            f"{RESULT}is no number but a range or a text: use a query with an instant vector or a scalar",
        ),
    ),
    "a histogram": (
        answer("vector", [{"metric": {}, "histogram": [1.5, {}]}]),
        Refusal(
            INCONCLUSIVE,
            f"{RESULT}is a histogram: use a query with a number, for example histogram_quantile(...)",
        ),
    ),
    "a text as its number": (vector(SECRET), Refusal(ERROR, NOT_PROMETHEUS)),
    "another format": (Answer(200, {"status": SECRET}), Refusal(ERROR, NOT_PROMETHEUS)),
    "a list": (Answer(200, [SECRET]), Refusal(ERROR, NOT_PROMETHEUS)),
    "a sample of another format": (
        answer("vector", [{"value": {SECRET: 1}}]),
        Refusal(ERROR, NOT_PROMETHEUS),
    ),
    "no JSON": (Answer(200, f"<html>{SECRET}"), Refusal(ERROR, NOT_PROMETHEUS)),
    "JSON without an end": (Answer(200, "[" * 60_000), Refusal(ERROR, NOT_PROMETHEUS)),
    "too many bytes": (
        vector(*["1"] * 2000),
        Refusal(
            ERROR, "Prometheus at URL did not answer with one number: the response is larger than 65536 bytes"
        ),
    ),
    "a wrong query": (
        Answer(400, {"status": "error", "error": SECRET}),
        Refusal(
            ERROR,
            "Prometheus at URL cannot evaluate the query: correct spec.onRegression.prometheus.query (HTTP 400)",
        ),
    ),
    "a redirect": (
        Answer(302, SECRET, {"Location": "http://127.0.0.1:9/"}),
        Refusal(
            ERROR,
            f"{NOT_PROMETHEUS}, and whether a login page intercepts requests (HTTP 302)",
        ),
    ),
    "no access": (
        Answer(403, SECRET),
        Refusal(
            ConditionReason.PROMETHEUS_FORBIDDEN,
            "Prometheus at URL refuses access: check the Secret in spec.onRegression.prometheus.secretRef (HTTP 403)",
        ),
    ),
    "too busy": (
        Answer(503, SECRET),
        Refusal(UNREACHABLE, "Prometheus at URL cannot be reached: HTTP 503"),
    ),
    "no answer": (None, Refusal(UNREACHABLE, "Prometheus at URL cannot be reached: the connection failed")),
}


@pytest.mark.parametrize(("reply", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_no_number(reply: Answer | None, expected: Refusal) -> None:
    with prometheus(reply) as (url, _), pytest.raises(ExternalError) as raised:
        Prometheus(url).read_number("up")
    problem = raised.value.problem
    assert (problem.reason, problem.message.replace(url, "URL")) == expected
    assert SECRET not in problem.message


@pytest.mark.parametrize("token", ["two\nlines", "a space", "caf\u00e9", "x" * 8193])
def test_a_token_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(ExternalError) as raised:
        Prometheus("http://127.0.0.1:9", token).read_number("up")
    assert raised.value.problem.reason == ConditionReason.CREDENTIALS_UNREADABLE
    assert token not in raised.value.problem.message
    assert token not in repr(Prometheus("http://127.0.0.1:9", token))
