"""The stand-in workspace's HTTP server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote, urlsplit

from databricks.sdk.service.catalog import MetastoreAssignment
from databricks.sdk.service.ml import GetRunResponse

from standins.databricks.endpoints import EndpointRefusal
from standins.databricks.state import Json, Refusal, Workspace
from support.http_server import Answer, Request, serving

_Parts = dict[str, str]
_Handler = Callable[[Workspace, _Parts, Json], Json]


@contextmanager
def running(workspace: Workspace | None = None, port: int = 0) -> Iterator[Workspace]:
    """A workspace that answers on loopback for as long as the block runs."""
    held = workspace or Workspace()
    with serving(lambda request: _respond(held, request), port) as held.uri:
        yield held


def _respond(state: Workspace, request: Request) -> Answer:
    path = unquote(urlsplit(request.target).path)
    state.agents.add(request.headers.get("User-Agent", ""))
    fault = state.fault(request.method, path)
    if fault:
        time.sleep(fault.seconds)
        return _answer(fault.status, fault.body, dict(fault.headers))
    try:
        return _answer(200, _ask(state, path, request))
    except Refusal as refusal:
        return _answer(refusal.status, refusal.body)
    except EndpointRefusal as refusal:
        status, code, message = refusal.args
        return _answer(status, {"error_code": code, "message": message})


def _answer(status: int, body: Json | str, headers: dict[str, str] | None = None) -> Answer:
    kind = "text/html" if isinstance(body, str) else "application/json"
    return Answer(status, body, {"Content-Type": kind, **(headers or {})})


def _ask(state: Workspace, path: str, request: Request) -> Json:
    authorization, text = request.headers.get("Authorization", ""), request.body.decode()
    if path == "/.well-known/databricks-config":
        return {
            "oidc_endpoint": f"{state.uri}/oidc",
            "account_id": "account",
            "workspace_id": "1234",
            "cloud": "AWS",
        }
    if path == "/oidc/.well-known/oauth-authorization-server":
        return {
            "authorization_endpoint": f"{state.uri}/oidc/v1/authorize",
            "token_endpoint": f"{state.uri}/oidc/v1/token",
        }
    if path == "/oidc/v1/token":
        try:
            return state.login(dict(parse_qsl(text)), authorization)
        except Refusal as refusal:
            body = {"error": refusal.body["error_code"], "error_description": refusal.body["message"]}
            refusal.body = body
            raise
    state.check(authorization, request.method, path)
    query = dict(parse_qsl(urlsplit(request.target).query))
    for method, pattern, answer in _PATHS:
        found = re.fullmatch(pattern, path)
        if method == request.method and found:
            return answer(state, query | found.groupdict(), json.loads(text) if text else {})
    raise Refusal(404, "ENDPOINT_NOT_FOUND", f"No API found for '{request.method} {path}'")


def _run(state: Workspace, parts: _Parts, _: Json) -> Json:
    found = state.runs.get(parts["run_id"])
    if found is None:
        raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Run '{parts['run_id']}' not found.")
    return GetRunResponse(found).as_dict()


def _set_tag(state: Workspace, _: _Parts, body: Json) -> Json:
    state.version(body["name"], body["version"]).tags[body["key"]] = body["value"]
    return {}


_SERVING = "/api/2.0/serving-endpoints"
_MODEL = r"/api/2.1/unity-catalog/models/(?P<name>[^/]+)"
_MLFLOW = "/api/2.0/mlflow"
_PATHS: list[tuple[str, str, _Handler]] = [
    ("POST", _SERVING, lambda state, _, body: state.endpoints.create(body)),
    ("POST", f"{_SERVING}/pt", lambda state, _, body: state.endpoints.create_reserved(body)),
    ("GET", rf"{_SERVING}/(?P<name>[^/]+)", lambda state, parts, _: state.endpoints.get(parts["name"])),
    ("DELETE", rf"{_SERVING}/(?P<name>[^/]+)", lambda state, parts, _: state.endpoints.delete(parts["name"])),
    (
        "PUT",
        rf"{_SERVING}/pt/(?P<name>[^/]+)/config",
        lambda state, parts, body: state.endpoints.configure_reserved(parts["name"], body),
    ),
    (
        "PUT",
        rf"{_SERVING}/(?P<name>[^/]+)/config",
        lambda state, parts, body: state.endpoints.configure(parts["name"], body),
    ),
    (
        "PUT",
        rf"{_SERVING}/(?P<name>[^/]+)/ai-gateway",
        lambda state, parts, body: state.endpoints.put_gateway(parts["name"], body),
    ),
    (
        "GET",
        _MODEL,
        lambda state, parts, _: state.describe_model(
            parts["name"], aliases=parts.get("include_aliases") == "true"
        ),
    ),
    (
        "GET",
        "/api/2.1/unity-catalog/current-metastore-assignment",
        lambda state, _, __: MetastoreAssignment(workspace_id=1234, metastore_id=state.metastore).as_dict(),
    ),
    (
        "PUT",
        rf"{_MODEL}/aliases/(?P<alias>[^/]+)",
        lambda state, parts, body: state.set_alias(parts["name"], parts["alias"], int(body["version_num"])),
    ),
    (
        "DELETE",
        rf"{_MODEL}/aliases/(?P<alias>[^/]+)",
        lambda state, parts, _: state.delete_alias(parts["name"], parts["alias"]),
    ),
    (
        "GET",
        f"{_MLFLOW}/unity-catalog/model-versions/get",
        lambda state, parts, _: {"model_version": state.describe_version(parts["name"], parts["version"])},
    ),
    ("POST", f"{_MLFLOW}/unity-catalog/model-versions/set-tag", _set_tag),
    ("GET", f"{_MLFLOW}/runs/get", _run),
]
