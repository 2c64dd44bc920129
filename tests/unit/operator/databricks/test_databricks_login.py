"""Logging in to a workspace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.login import _check_login_url
from finetune_operator.databricks.workspace import open_workspace
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Fault, Workspace
from support.http_server import Answer, Request, serving
from unit.operator.databricks.logins import (
    ENDPOINT,
    ask,
    by_client,
    by_token,
    installed,
    problem,
    serve_endpoint,
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
        f"Databricks at {databricks.uri} names a token endpoint at another address, or none: set the host to the workspace's own address"
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
        "no Databricks workspace is configured: install the chart with databricks.host, or set secretRef to a "
        "Secret with DATABRICKS_HOST with DATABRICKS_TOKEN, or DATABRICKS_HOST with DATABRICKS_CLIENT_ID and "
        "DATABRICKS_CLIENT_SECRET; for a FineTuneJob, whose secretRef cannot change, create a job with another name",
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
        "DATABRICKS_HOST is not a workspace address: use an address like https://example.cloud.databricks.com, without a path or a query",
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
