"""Logging in to a workspace, and what its errors come to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.databricks import transport
from finetune_operator.databricks.login import _check_login_url
from finetune_operator.databricks.workspace import open_workspace, translate_errors
from finetune_operator.errors import ExternalError
from finetune_operator.settings import Settings
from standins.databricks import Fault, Workspace
from support.http_server import Answer, Request, serving

ENDPOINT = "/api/2.0/serving-endpoints/support"


def ask(secret: Mapping[str, str] | None, settings: Settings | None = None) -> None:
    """One request, which needs a login."""
    client = open_workspace(secret, settings or Settings())
    with translate_errors(client, "read the serving endpoint support"):
        client.serving_endpoints.get("support")


def problem(
    secret: Mapping[str, str] | None, settings: Settings | None = None
) -> tuple[ConditionReason, str]:
    with pytest.raises(ExternalError) as raised:
        ask(secret, settings)
    assert raised.value.__cause__ is None
    return raised.value.problem.reason, raised.value.problem.message


def by_token(state: Workspace, credential: str = "dapi-good\n") -> dict[str, str]:
    return {"DATABRICKS_HOST": f"{state.uri}/\n", "DATABRICKS_TOKEN": credential}


def by_client(state: Workspace, credential: str = "principal-secret") -> dict[str, str]:
    return {
        "DATABRICKS_HOST": state.uri,
        "DATABRICKS_CLIENT_ID": "principal",
        "DATABRICKS_CLIENT_SECRET": credential,
    }


def installed(state: Workspace, path: Path, client_id: str = "operator") -> Settings:
    return Settings(
        databricks_host=state.uri, databricks_client_id=client_id, databricks_token_file=str(path / "token")
    )


def serve_endpoint(state: Workspace) -> None:
    entity: dict[str, object] = {
        "name": "version-1",
        "entity_name": "main.llm.support",
        "entity_version": "1",
        "workload_size": "Small",
        "scale_to_zero_enabled": True,
    }
    routes = {"routes": [{"served_entity_name": "version-1", "traffic_percentage": 100}]}
    state.endpoints.create(
        {"name": "support", "config": {"served_entities": [entity], "traffic_config": routes}}
    )


WAYS: dict[str, tuple[Callable[[Workspace, Path], tuple[dict[str, str] | None, Settings]], list[str]]] = {
    "a token": (lambda state, _: (by_token(state), Settings()), []),
    "a client's secret": (lambda state, _: (by_client(state), Settings()), ["client_credentials"]),
    "a service-account token": (
        lambda state, path: (None, installed(state, path)),
        ["urn:ietf:params:oauth:grant-type:token-exchange"],
    ),
}


@pytest.mark.parametrize(("way", "logins"), WAYS.values(), ids=WAYS)
def test_ways_to_log_in(
    databricks: Workspace,
    tmp_path: Path,
    way: Callable[[Workspace, Path], tuple[dict[str, str] | None, Settings]],
    logins: list[str],
) -> None:
    (tmp_path / "token").write_text("jwt-of-the-operator\n")
    databricks.federated = {"jwt-of-the-operator": "operator"}
    serve_endpoint(databricks)
    secret, settings = way(databricks, tmp_path)
    ask(secret, settings)
    ask(secret, settings)
    assert databricks.asked == [("GET", ENDPOINT)] * 2
    # The login is kept from call to call.
    assert databricks.logins == logins


def test_a_token_that_is_no_longer_accepted_is_replaced(databricks: Workspace) -> None:
    serve_endpoint(databricks)
    ask(by_client(databricks))
    databricks.revoke()
    assert problem(by_client(databricks))[0] == ConditionReason.DATABRICKS_FORBIDDEN
    ask(by_client(databricks))
    assert databricks.logins == ["client_credentials"] * 2


MALFORMED: dict[str, object] = {
    "no object": [],
    "a text": "inside",
    "a null": {"oidc_endpoint": None},
    "a number": {"oidc_endpoint": 1},
    "an object": {"oidc_endpoint": {}, "account_id": [], "workspace_id": {}},
    "no cloud": {"oidc_endpoint": "", "cloud": None},
    "no address": {"oidc_endpoint": "http://[inside"},
    "nothing": {},
}


@pytest.mark.parametrize("metadata", MALFORMED.values(), ids=MALFORMED)
def test_malformed_metadata_is_no_answer(databricks: Workspace, metadata: Any) -> None:
    serve_endpoint(databricks)
    databricks.faults = [Fault(200, metadata, path="/.well-known/databricks-config")]
    ask(by_client(databricks))
    databricks.faults = [Fault(200, metadata, path="/.well-known/databricks-config")]
    ask(by_token(databricks))


FOREIGN: dict[str, Callable[[str, str], object]] = {
    "another server": lambda inside, _: f"{inside}/oidc/v1/token",
    "a login in the address": lambda _, host: host.replace("://", "://me:secret@") + "/oidc/v1/token",
    "another port": lambda _, host: f"{host}1/oidc/v1/token",
    "a name before a server": lambda inside, host: f"{host}@{inside.removeprefix('http://')}/token",
    "no address": lambda _, _own: "http://[inside",
    "a path": lambda _, _own: "/oidc/v1/token",
    "a file": lambda _, _own: "file:///etc/passwd",
    "an account without TLS": lambda _, _own: "http://accounts.cloud.databricks.com/oidc",
    "a name like an account": lambda _, _own: "https://accounts.cloud.databricks.com.inside/oidc",
    "nothing": lambda _, _own: None,
}


@pytest.mark.parametrize("address", FOREIGN.values(), ids=FOREIGN)
def test_a_login_stays_at_the_workspace(databricks: Workspace, address: Callable[[str, str], object]) -> None:
    targets: list[str] = []

    def inside(request: Request) -> Answer:
        targets.append(request.target)
        return Answer(401, {"error": "s3cr3t of inside", "error_description": "s3cr3t of inside"})

    with serving(inside) as uri:
        endpoint = {"token_endpoint": address(uri, databricks.uri)}
        databricks.faults = [Fault(200, endpoint, path="/oidc/.well-known")]
        reason, message = problem(by_client(databricks))
    assert (reason, targets, databricks.logins) == (ConditionReason.DATABRICKS_ERROR, [], [])
    assert message == (
        f"Databricks at {databricks.uri} names no token endpoint at its own address: check the address, and use the one that the "
        "workspace itself uses"
    )


def test_discovery_stays_at_the_workspace(databricks: Workspace) -> None:
    targets: list[str] = []

    def inside(request: Request) -> Answer:
        targets.append(request.target)
        return Answer(200, {"token_endpoint": f"{databricks.uri}/oidc/v1/token"})

    serve_endpoint(databricks)
    with serving(inside) as uri:
        databricks.faults = [
            Fault(200, {"oidc_endpoint": f"{uri}/oidc"}, path="/.well-known/databricks-config")
        ]
        ask(by_client(databricks))
    assert (targets, databricks.logins) == ([], ["client_credentials"])


@pytest.mark.parametrize(
    "address",
    [
        "https://accounts.cloud.databricks.com/oidc/accounts/a/v1/token",
        "https://accounts.databricks.com:443/oidc",
    ],
)
def test_a_login_at_the_account(address: str) -> None:
    assert _check_login_url("https://w.cloud.databricks.com", address) == address.replace(":443", "")


def test_a_client_made_while_the_workspace_was_away_is_made_again(databricks: Workspace) -> None:
    serve_endpoint(databricks)
    away = {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "Later"}
    databricks.faults = [Fault(503, away, path="/.well-known"), Fault(503, away, path="/api")]
    assert problem(by_token(databricks))[0] == ConditionReason.DATABRICKS_UNREACHABLE
    databricks.faults = []
    ask(by_token(databricks))
    assert open_workspace(by_token(databricks), Settings()).config.workspace_id == "1234"


def test_the_service_account_token_is_read_anew(databricks: Workspace, tmp_path: Path) -> None:
    serve_endpoint(databricks)
    settings = installed(databricks, tmp_path)
    (tmp_path / "token").write_text("old")
    databricks.federated = {"new": "operator"}
    assert problem(None, settings)[0] == ConditionReason.DATABRICKS_FORBIDDEN
    (tmp_path / "token").write_text("new")
    ask(None, settings)


def test_the_environment_does_not_leak_in(
    databricks: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_endpoint(databricks)
    (tmp_path / "config").write_text("[DEFAULT]\nhost = http://127.0.0.1:1\ntoken = dapi-file\n")
    for name, value in {
        "DATABRICKS_HOST": "http://127.0.0.1:1",
        "DATABRICKS_TOKEN": "dapi-environment",
        "DATABRICKS_CLIENT_ID": "other",
        "DATABRICKS_CLIENT_SECRET": "other-secret",
        "DATABRICKS_AUTH_TYPE": "basic",
        "DATABRICKS_WORKSPACE_ID": "999",
        "DATABRICKS_CONFIG_FILE": str(tmp_path / "config"),
    }.items():
        monkeypatch.setenv(name, value)
    ask(by_token(databricks))
    ask(by_client(databricks))
    assert problem(None) == (
        ConditionReason.DATABRICKS_NOT_CONFIGURED,
        "no Databricks workspace is configured: set secretRef to a Secret with DATABRICKS_HOST with DATABRICKS_TOKEN, or "
        "DATABRICKS_HOST with DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET, or install the chart with "
        "databricks.host",
    )
    wrong = problem(by_token(databricks, "dapi-wrong"))
    assert "dapi" not in wrong[1]
    assert "DATABRICKS" not in wrong[1]


def test_the_operators_own_token_goes_to_its_own_host_alone(databricks: Workspace, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("jwt-of-the-operator")
    databricks.federated = {"jwt-of-the-operator": "operator"}
    settings = Settings(databricks_host="http://127.0.0.1:1", databricks_token_file=str(tmp_path / "token"))
    assert (
        problem({"DATABRICKS_HOST": databricks.uri}, settings)[0] == ConditionReason.DATABRICKS_NOT_CONFIGURED
    )
    assert (
        problem({"DATABRICKS_TOKEN": "dapi-good"}, settings)[0] == ConditionReason.DATABRICKS_NOT_CONFIGURED
    )
    assert databricks.logins == []
    assert databricks.asked == []


MUST_HAVE = (
    "the Secret that secretRef names must have DATABRICKS_HOST with DATABRICKS_TOKEN, or DATABRICKS_HOST with "
    "DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET"
)
INCOMPLETE: dict[str, tuple[dict[str, str] | None, Settings, str]] = {
    "nothing in the Secret": (
        {},
        Settings(databricks_host="https://w"),
        "the Secret that secretRef names lacks DATABRICKS_HOST: it must have DATABRICKS_HOST with DATABRICKS_TOKEN, or "
        "DATABRICKS_HOST with DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET",
    ),
    "a host alone": ({"DATABRICKS_HOST": "w"}, Settings(), MUST_HAVE),
    "half a client": ({"DATABRICKS_HOST": "w", "DATABRICKS_CLIENT_ID": "c"}, Settings(), MUST_HAVE),
    "two ways": (
        {"DATABRICKS_HOST": "w", "DATABRICKS_TOKEN": "t", "DATABRICKS_CLIENT_ID": "c"},
        Settings(),
        "the Secret that secretRef names has both DATABRICKS_TOKEN and a DATABRICKS_CLIENT_ID or DATABRICKS_CLIENT_SECRET: remove "
        "one of the logins",
    ),
    "no address": (
        {"DATABRICKS_HOST": "https://me:secret@w", "DATABRICKS_TOKEN": "t"},
        Settings(),
        "DATABRICKS_HOST is not a workspace address: use an address like https://example.cloud.databricks.com",
    ),
    "installed without a token": (
        None,
        Settings(databricks_host="https://w"),
        "the operator has no service-account token for Databricks: install the chart with databricks.tokenAudience",
    ),
}


@pytest.mark.parametrize(("secret", "settings", "message"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_incomplete(secret: dict[str, str] | None, settings: Settings, message: str) -> None:
    assert problem(secret, settings) == (ConditionReason.DATABRICKS_NOT_CONFIGURED, message)


def test_a_service_account_token_that_is_not_there(databricks: Workspace, tmp_path: Path) -> None:
    assert problem(None, installed(databricks, tmp_path)) == (
        ConditionReason.DATABRICKS_NOT_CONFIGURED,
        "the operator's service-account token for Databricks cannot be read: FileNotFoundError: install the chart with "
        "databricks.tokenAudience",
    )


def test_logins_that_are_refused(databricks: Workspace, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("jwt-of-a-person")
    at = f"Databricks at {databricks.uri} rejected the credentials:"
    secret = "check the Secret that secretRef names"
    assert [
        problem(by_token(databricks, "dapi-wrong")),
        problem(by_client(databricks, "wrong-secret")),
        problem(None, installed(databricks, tmp_path)),
    ] == [
        (
            ConditionReason.DATABRICKS_FORBIDDEN,
            f"{at} {secret} (UNAUTHENTICATED, HTTP 401)",
        ),
        (
            ConditionReason.DATABRICKS_FORBIDDEN,
            f"{at} {secret} (invalid_client, HTTP 401)",
        ),
        (
            ConditionReason.DATABRICKS_FORBIDDEN,
            f"{at} check databricks.clientId of the chart, and the federation policy of its service principal "
            "(invalid_client, HTTP 401)",
        ),
    ]


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
        assert problem({"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": "dapi-good"}) == (
            ConditionReason.DATABRICKS_UNREACHABLE,
            f"Databricks at {host} cannot be reached: the connection failed",
        )


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
