"""The stand-in workspace's HTTP server."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote, urlsplit

from databricks.sdk.service.catalog import MetastoreAssignment
from databricks.sdk.service.ml import GetRunResponse

from standins.databricks.endpoints import EndpointRefusal
from standins.databricks.files import SIGNED, FileRefusal, Files
from standins.databricks.jobs import JobRefusal
from standins.databricks.state import Json, Workspace
from standins.databricks.tracking import TrackingRefusal
from standins.databricks.unity import Refusal
from support.http_server import Answer, Request, serving

_Parts = dict[str, str]
_Handler = Callable[[Workspace, _Parts, Json], Json]


@contextmanager
def running(
    workspace: Workspace | None = None, port: int = 0, interface: str = "127.0.0.1"
) -> Iterator[Workspace]:
    """A workspace that answers on one interface, by default loopback, for as long as the block runs."""
    state = workspace or Workspace()
    try:
        with serving(lambda request: _respond(state, request), port, interface) as state.uri:
            state.jobs.uri = state.uri
            yield state
    finally:
        state.jobs.stop()
        shutil.rmtree(state.folder, ignore_errors=True)


def _respond(state: Workspace, request: Request) -> Answer:
    path = unquote(urlsplit(request.target).path)
    state.agents.add(request.headers.get("User-Agent", ""))
    fault = state.fault(request.method, path)
    if fault:
        time.sleep(fault.seconds)
        return _answer(fault.status, fault.body, dict(fault.headers))
    try:
        return _serve(state, path, request)
    except Refusal as refusal:
        return _answer(refusal.status, refusal.body)
    except (EndpointRefusal, FileRefusal, JobRefusal, TrackingRefusal) as refusal:
        status, code, message = refusal.args
        return _answer(status, {"error_code": code, "message": message})


def _serve(state: Workspace, path: str, request: Request) -> Answer:
    if path.startswith(SIGNED):
        return _signed(state, path, request)
    if path.startswith(_FILES):
        return _file(state, path.removeprefix(_FILES), request)
    if _is_tracking(state, path, request):
        return _track(state, path, request)
    metrics = re.fullmatch(rf"{_SERVING}/([^/]+)/metrics", path)
    if metrics:
        state.check(request.headers.get("Authorization", ""), request.method, path)
        return Answer(200, state.endpoints.export(metrics[1]), {"Content-Type": "text/plain"})
    return _answer(200, _ask(state, path, request))


def _answer(status: int, body: Json | str, headers: dict[str, str] | None = None) -> Answer:
    kind = "text/html" if isinstance(body, str) else "application/json"
    return Answer(status, body, {"Content-Type": kind, **(headers or {})})


def _ask(state: Workspace, path: str, request: Request) -> Json:
    authorization, text = request.headers.get("Authorization", ""), request.body.decode()
    if path == "/.well-known/databricks-config":
        return {
            "oidc_endpoint": f"{state.uri}/oidc",
            "account_id": "account",
            "workspace_id": state.workspace_id,
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
        match = re.fullmatch(pattern, path)
        if method == request.method and match:
            return answer(state, query | match.groupdict(), json.loads(text) if text else {})
    raise Refusal(404, "ENDPOINT_NOT_FOUND", f"No API found for '{request.method} {path}'")


def _is_tracking(state: Workspace, path: str, request: Request) -> bool:
    """Whether MLflow's own server answers. It is not started for a run that a test put there, or removed."""
    if not path.startswith((f"{_MLFLOW}/", "/api/3.0/mlflow/")) or path.startswith(
        f"{_MLFLOW}/unity-catalog/"
    ):
        return False
    query = dict(parse_qsl(urlsplit(request.target).query))
    is_answered_here = query.get("run_id") in state.runs or not state.tracking.is_open
    return not (path == f"{_MLFLOW}/runs/get" and is_answered_here)


def _track(state: Workspace, path: str, request: Request) -> Answer:
    state.check(request.headers.get("Authorization", ""), request.method, path)
    status, text = state.tracking.ask(request.method, request.target, request.body)
    headers = {"Content-Type": "application/json", "X-Databricks-Org-Id": state.workspace_id}
    return Answer(status, text, headers)


def _file(state: Workspace, path: str, request: Request) -> Answer:
    """The Files API, which answers HEAD and GET of folders under another path than those of files."""
    state.check(request.headers.get("Authorization", ""), request.method, f"{_FILES}{path}")
    kind, _, place = path.partition("/")
    place, query = f"/{place}", dict(parse_qsl(urlsplit(request.target).query))
    if kind in ("create-upload-url", "create-download-url"):
        # NB: MLflow's client names the file in the body, the SDK in the query.
        return _answer(
            200, state.files.sign(state.uri, query.get("path") or json.loads(request.body)["path"])
        )
    if kind == "create-upload-part-urls":
        return _answer(200, state.files.sign_parts(state.uri, json.loads(request.body)))
    if kind == "directories":
        return _answer(200, _directory(state.files, request.method, place, query))
    if request.method in ("GET", "HEAD"):
        content = state.files.read(place)
        size = {"Content-Length": str(len(content))}
        return Answer(200, b"" if request.method == "HEAD" else content, _CONTENT | size)
    return _answer(200, _change(state.files, request, place, query))


def _change(files: Files, request: Request, path: str, query: _Parts) -> Json:
    overwrite = query.get("overwrite") != "false"
    if query.get("action") == "initiate-upload":
        return files.begin(path, overwrite=overwrite)
    if query.get("action") == "complete-upload":
        return files.complete(query["session_token"], json.loads(request.body))
    if request.method == "DELETE":
        return files.delete(path)
    return files.write(path, request.body, overwrite=overwrite)


def _directory(files: Files, method: str, path: str, query: _Parts) -> Json:
    if method == "PUT":
        return files.make_directory(path)
    if method == "DELETE":
        return files.delete_directory(path)
    if method == "HEAD":
        files.directory(path)
        return {}
    return files.list(path, query.get("page_token", ""))


def _signed(state: Workspace, path: str, request: Request) -> Answer:
    place = state.files.signed(path)
    query = dict(parse_qsl(urlsplit(request.target).query))
    if "part" in query:
        tag = state.files.write_part(query["session"], int(query["part"]), request.body)
        return _answer(200, {}, {"ETag": tag})
    if request.method == "PUT":
        return _answer(200, state.files.write(place, request.body))
    return Answer(200, state.files.read(place), _CONTENT)


def _run(state: Workspace, parts: _Parts, _: Json) -> Json:
    run = state.runs.get(parts["run_id"])
    if run is None:
        raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Run '{parts['run_id']}' not found.")
    return GetRunResponse(run).as_dict()


_SERVING = "/api/2.0/serving-endpoints"
_MODEL = r"/api/2.1/unity-catalog/models/(?P<name>[^/]+)"
_MLFLOW = "/api/2.0/mlflow"
_FILES = "/api/2.0/fs/"
_JOBS = "/api/2.2/jobs/runs"
_CONTENT = {"Content-Type": "application/octet-stream", "Last-Modified": "Wed, 01 Jul 2026 00:00:00 GMT"}
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
        r"/api/2.1/unity-catalog/tables/(?P<name>[^/]+)",
        lambda state, parts, _: state.tables.get(parts["name"]),
    ),
    (
        "POST",
        "/api/2.0/unity-catalog/temporary-table-credentials",
        lambda state, _, body: state.tables.credentials(body),
    ),
    (
        "GET",
        "/api/2.1/unity-catalog/current-metastore-assignment",
        lambda state, _, __: MetastoreAssignment(
            workspace_id=int(state.workspace_id), metastore_id=state.metastore
        ).as_dict(),
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
    (
        "GET",
        f"{_MLFLOW}/unity-catalog/model-versions/search",
        lambda state, parts, body: state.search_versions(parts.get("filter") or body.get("filter", "")),
    ),
    (
        "POST",
        f"{_MLFLOW}/unity-catalog/model-versions/set-tag",
        lambda state, _, body: state.set_version_tag(
            body["name"], body["version"], body["key"], body["value"]
        ),
    ),
    (
        "POST",
        f"{_MLFLOW}/unity-catalog/registered-models/create",
        lambda state, _, body: state.create_model(body["name"]),
    ),
    (
        "POST",
        f"{_MLFLOW}/unity-catalog/model-versions/create",
        lambda state, _, body: state.create_version(body),
    ),
    (
        "POST",
        f"{_MLFLOW}/unity-catalog/model-versions/generate-temporary-credentials",
        lambda state, _, body: {
            "credentials": {"storage_mode": "DEFAULT_STORAGE"}
            if state.version(body["name"], body["version"])
            else {}
        },
    ),
    (
        "POST",
        f"{_MLFLOW}/unity-catalog/model-versions/finalize",
        lambda state, _, body: state.finalize_version(body["name"], body["version"]),
    ),
    (
        "GET",
        rf"{_MLFLOW}/unity-catalog/registered-models:is-databricks-sdk-models-artifact-repository-enabled",
        lambda *_: {"is_databricks_sdk_models_artifact_repository_enabled": False},
    ),
    ("GET", f"{_MLFLOW}/runs/get", _run),
    ("POST", f"{_JOBS}/submit", lambda state, _, body: state.jobs.submit(body)),
    ("POST", f"{_JOBS}/cancel", lambda state, _, body: state.jobs.cancel(int(body["run_id"]))),
    ("GET", f"{_JOBS}/get", lambda state, parts, _: state.jobs.get(int(parts["run_id"]))),
    ("GET", f"{_JOBS}/get-output", lambda state, parts, _: state.jobs.output(int(parts["run_id"]))),
    ("GET", f"{_JOBS}/list", lambda state, parts, _: state.jobs.list(parts)),
]
