"""What the errors and answers of a workspace come to."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.databricks import transport
from finetune_operator.errors import ExternalError
from fixtures.fake_databricks import Fault, Workspace
from support.counted import counted
from support.http_server import Answer, serving
from unit.operator.databricks.logins import (
    ENDPOINT,
    ask,
    by_client,
    by_token,
    problem,
    serve_endpoint,
)

ERRORS: dict[str, tuple[Fault, ConditionReason, str]] = {
    "no permission": (
        Fault(403, {"error_code": "PERMISSION_DENIED", "message": "You need CAN MANAGE"}),
        ConditionReason.DATABRICKS_FORBIDDEN,
        "Databricks at {uri} denied the operator permission to read the serving endpoint support: grant the permission, or "
        "use other credentials (PERMISSION_DENIED, HTTP 403)",
    ),
    "too many requests": (
        Fault(
            429,
            {"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "Slow down"},
            headers={"Retry-After": "60"},
        ),
        ConditionReason.DATABRICKS_UNREACHABLE,
        "Databricks at {uri} is too busy to read the serving endpoint support: REQUEST_LIMIT_EXCEEDED, HTTP 429",
    ),
    "not now": (
        Fault(503, {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "Later"}),
        ConditionReason.DATABRICKS_UNREACHABLE,
        "Databricks at {uri} is too busy to read the serving endpoint support: TEMPORARILY_UNAVAILABLE, HTTP 503",
    ),
    "it broke": (
        Fault(500, {"error_code": "INTERNAL_ERROR", "message": "Oops, dapi-good"}),
        ConditionReason.DATABRICKS_ERROR,
        "Databricks at {uri} failed to read the serving endpoint support (INTERNAL_ERROR, HTTP 500): see the log of the operator for the reason",
    ),
    "a login page": (
        Fault(200, "<html>log in</html>"),
        ConditionReason.DATABRICKS_ERROR,
        "{uri} does not respond like a Databricks workspace: check the address, and whether a login page or a proxy "
        "intercepts requests",
    ),
    "a proxy's error": (
        Fault(418, "<html>teapot</html>"),
        ConditionReason.DATABRICKS_ERROR,
        "{uri} does not respond like a Databricks workspace: check the address, and whether a login page or a proxy "
        "intercepts requests",
    ),
}


@pytest.mark.parametrize(("fault", "reason", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(databricks: Workspace, fault: Fault, reason: ConditionReason, message: str) -> None:
    fault.path = ENDPOINT
    databricks.faults = [fault]
    began = time.monotonic()
    assert problem(by_token(databricks)) == (reason, message.replace("{uri}", databricks.uri))
    # It never waits for a retry, even if Databricks asks for one.
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("fault", "reason", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("token", ["e", "r", "Databricks", "HTTP 503"])
def test_a_token_that_is_a_word_changes_no_message(
    databricks: Workspace, fault: Fault, reason: ConditionReason, message: str, token: str
) -> None:
    databricks.tokens.add(token)
    fault.path = ENDPOINT
    databricks.faults = [fault]
    assert problem(by_token(databricks, token)) == (reason, message.replace("{uri}", databricks.uri))


INSIDE = "s3cr3t of inside"


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 409, 418, 429, 500, 503])
@pytest.mark.parametrize(
    "body",
    [
        {"error_code": INSIDE, "message": INSIDE, "error": INSIDE, "error_description": INSIDE},
        {"detail": INSIDE, "status": INSIDE, "scimType": INSIDE},
        {"access_token": "t", "expires_in": INSIDE},
        [INSIDE],
        f"<title>{INSIDE}</title>",
        f"INSIDE: {INSIDE}",
    ],
    ids=["an error", "SCIM", "a token", "a list", "HTML", "text"],
)
@pytest.mark.parametrize("path", ["/api", "/oidc/v1/token"], ids=["a request", "a login"])
def test_no_text_of_an_answer_shows(databricks: Workspace, path: str, body: Any, status: int) -> None:
    databricks.faults = [Fault(status, body, path=path)]
    message = ""
    try:
        ask(by_client(databricks))
    except ExternalError as error:
        message = error.problem.message
    assert "inside" not in message.lower()


def test_the_text_of_an_answer_is_in_the_log(databricks: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    answer = {"error_code": "INTERNAL_ERROR", "message": "Oops, dapi-good"}
    databricks.faults = [Fault(500, answer, path=ENDPOINT)]
    problem(by_token(databricks))
    assert [record.getMessage() for record in caplog.records] == [
        f"Databricks at {databricks.uri} failed to read the serving endpoint support: Oops, ***"
    ]


def test_no_server_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with counted("finetune_operator_requests") as changes:
            assert problem({"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": "dapi-good"}) == (
                ConditionReason.DATABRICKS_UNREACHABLE,
                f"Databricks at {host} cannot be reached: the connection failed",
            )
        # The SDK asks for the metadata of the host first.
        assert changes == {"_total Databricks none": 2}


def test_no_answer_in_time(databricks: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "TIMEOUT_SECONDS", 0.5)
    databricks.faults = [Fault(200, path="/api", seconds=2)]
    assert problem(by_token(databricks)) == (
        ConditionReason.DATABRICKS_UNREACHABLE,
        f"Databricks at {databricks.uri} cannot be reached: the request timed out",
    )


def test_it_says_who_asks(databricks: Workspace) -> None:
    serve_endpoint(databricks)
    ask(by_token(databricks))
    assert any(agent.startswith("finetune-operator/") for agent in databricks.agents)


@pytest.mark.parametrize("path", ["/api", "/oidc"], ids=["a request", "a login"])
def test_a_redirect_is_not_followed(databricks: Workspace, path: str) -> None:
    with serving(lambda _: Answer(200, {"name": "inside"})) as inside:
        databricks.faults = [Fault(307, path=path, headers={"Location": inside})]
        reason, message = problem(by_client(databricks))
    assert (reason, "inside" in message) == (ConditionReason.DATABRICKS_UNREACHABLE, False)
    assert "the operator does not follow (HTTP 307)" in message


def test_an_answer_of_any_size_takes_no_memory(
    databricks: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_RESPONSE_BYTES", 2**20)
    databricks.faults = [Fault(200, {"name": "x" * 2**20}, path="/api")]
    assert problem(by_token(databricks)) == (
        ConditionReason.DATABRICKS_UNREACHABLE,
        f"Databricks at {databricks.uri} cannot be reached: the response is larger than 1048576 bytes",
    )
