"""The client of the API server, against a server that answers as told."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from finetune_operator.fence import Fence
from finetune_operator.kube import Kube, KubeError, Listing, build_path
from finetune_operator.shallow_json import MAX_LEVELS, REPLACEMENT
from support.counted import counted
from unit.operator.test_shallow_json import nest

Json = dict[str, Any]


class Server:
    """Answers in turn, and what was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Json | str]] = []
        self.asked: list[Json] = []
        self.headers: dict[str, str] = {}
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.asked.append(
            {
                "method": request.method,
                "path": request.path,
                "query": dict(request.query),
                "type": request.headers.get("Content-Type"),
                "token": request.headers.get("Authorization"),
                "body": json.loads(text) if text else None,
            }
        )
        status, body = self.answers.pop(0)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=self.headers)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    started = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", started.handle)
    async with TestServer(app) as running:
        started.url = str(running.make_url("")).rstrip("/")
        yield started


@pytest.fixture
async def kube(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kube]:
    write_config(tmp_path, monkeypatch, server.url)
    async with Kube() as client:
        yield client


def write_config(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let Kube find a kubeconfig that names this API server."""
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "s3cr3t"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


async def test_the_proxy_of_the_environment_is_read_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.answers = [(200, {"by": "the proxy"})]
    write_config(tmp_path, monkeypatch, "http://kubernetes.example:6443")
    async with Kube() as client:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert await client.get("Pod", "team", "a") == {"by": "the proxy"}
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_config(tmp_path, monkeypatch, server.url)
    server.answers = [(200, {"by": "the API server"})]
    async with Kube() as client:
        monkeypatch.delenv("no_proxy")
        assert await client.get("Pod", "team", "a") == {"by": "the API server"}


PATHS: dict[str, tuple[tuple[str, ...], str]] = {
    "all of a kind": (("Pod", ""), "/api/v1/pods"),
    "those of a namespace": (("Job", "team"), "/apis/batch/v1/namespaces/team/jobs"),
    "one": (("Service", "team", "tune"), "/api/v1/namespaces/team/services/tune"),
    "its status": (
        ("FineTuneJob", "team", "tune", "status"),
        "/apis/finetune.dev/v1alpha1/namespaces/team/finetunejobs/tune/status",
    ),
    "a name with a sign": (("Pod", "team", "a?b"), "/api/v1/namespaces/team/pods/a%3Fb"),
}


@pytest.mark.parametrize(("arguments", "expected"), PATHS.values(), ids=PATHS)
def test_path(arguments: tuple[str, ...], expected: str) -> None:
    kind, namespace, *names = arguments
    assert build_path(kind, namespace or None, *names) == expected


@pytest.mark.parametrize("name", ["../../other/secrets/theirs", "..", ".", "a/b"])
def test_no_name_leads_out_of_its_namespace(name: str) -> None:
    with pytest.raises(KubeError) as raised:
        build_path("Secret", "team", name)
    assert (raised.value.status, str(raised.value)) == (400, f"Secret {name}: this object name is not valid")


async def test_a_list_is_read_page_by_page_and_true_at_one_version(kube: Kube, server: Server) -> None:
    server.answers = [
        (200, {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"a": 1}]}),
        (200, {"metadata": {"resourceVersion": "7"}, "items": [{"a": 2}]}),
    ]
    with counted("finetune_operator_requests") as changes:
        listing = await kube.list("Pod", None, project=lambda pod: {"kept": pod["a"]}, labelSelector="x=y")
    assert changes == {"_total Kubernetes 200": 2}
    assert listing == ([{"kept": 1}, {"kept": 2}], 7)
    assert [item["query"] for item in server.asked] == [
        {"limit": "100", "labelSelector": "x=y"},
        {"limit": "100", "labelSelector": "x=y", "continue": "more"},
    ]
    assert server.asked[0]["token"] == "Bearer s3cr3t"


@pytest.mark.parametrize(("dry_run", "more"), [(False, {}), (True, {"dryRun": "All"})])
async def test_what_is_created_has_no_unknown_fields(
    kube: Kube, server: Server, *, dry_run: bool, more: Json
) -> None:
    body = {"kind": "Job", "metadata": {"namespace": "team", "name": "tune"}}
    server.answers = [(201, body)]
    assert await kube.create(body, dry_run=dry_run) == body
    request = server.asked[0]
    assert (request["method"], request["path"], request["body"]) == ("POST", build_path("Job", "team"), body)
    assert request["query"] == {
        "fieldManager": "finetune-operator",
        "fieldValidation": "Strict",
        "timeout": "30.000s",
        **more,
    }


async def test_apply_takes_the_fields_over(kube: Kube, server: Server) -> None:
    body = {"kind": "FineTuneJob", "metadata": {"namespace": "team", "name": "tune"}, "status": {}}
    server.answers = [(200, body)]
    assert await kube.apply(body, subresource="status") == body
    request = server.asked[0]
    assert (request["method"], request["path"]) == (
        "PATCH",
        build_path("FineTuneJob", "team", "tune", "status"),
    )
    assert request["query"] == {"fieldManager": "finetune-operator", "force": "true", "timeout": "30.000s"}
    assert (request["type"], request["body"]) == ("application/apply-patch+yaml", body)


async def test_fields_of_a_spec_are_replaced_as_a_whole_in_one_object(kube: Kube, server: Server) -> None:
    body = {"kind": "FineTuneJob", "metadata": {"namespace": "team", "name": "tune-1"}}
    server.answers = [(200, body)]
    fields = {"suspend": True, "pods": {}}
    assert await kube.set_spec("FineTuneJob", "team", "tune-1", "u1", fields) == body
    request = server.asked[0]
    assert (request["method"], request["path"]) == ("PATCH", build_path("FineTuneJob", "team", "tune-1"))
    assert request["query"] == {"fieldManager": "finetune-operator", "timeout": "30.000s"}
    assert (request["type"], request["body"]) == (
        "application/json-patch+json",
        [
            {"op": "replace", "path": "/metadata/uid", "value": "u1"},
            {"op": "add", "path": "/spec/suspend", "value": True},
            {"op": "add", "path": "/spec/pods", "value": {}},
        ],
    )


async def test_a_deletion_is_of_one_object_and_what_it_owns(kube: Kube, server: Server) -> None:
    server.answers = [(200, {})]
    await kube.delete("Job", "team", "tune-prep", "u1")
    assert server.asked[0]["body"] == {"propagationPolicy": "Background", "preconditions": {"uid": "u1"}}


async def test_a_deletion_may_be_of_one_version_alone(kube: Kube, server: Server) -> None:
    server.answers = [(200, {})]
    await kube.delete("Lease", "team", "l", "u1", version="7")
    assert server.asked[0]["path"] == "/apis/coordination.k8s.io/v1/namespaces/team/leases/l"
    assert server.asked[0]["body"]["preconditions"] == {"uid": "u1", "resourceVersion": "7"}


@pytest.mark.parametrize("status", [404, 409])
async def test_a_deletion_of_what_is_gone_is_well(kube: Kube, server: Server, status: int) -> None:
    server.answers = [(status, {"message": "gone"})]
    await kube.delete("Job", "team", "tune-prep", "u1")


async def test_what_does_not_exist_is_none(kube: Kube, server: Server) -> None:
    server.answers = [(404, {"message": "not found"})]
    assert await kube.get("Secret", "team", "s") is None


RETRY_AFTER: dict[str, tuple[dict[str, str], float]] = {
    "nothing": ({}, 0),
    "seconds": ({"Retry-After": "7"}, 7),
    "a date": ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, 0),
    "an hour": ({"Retry-After": "3600"}, 60),
}


@pytest.mark.parametrize(("headers", "seconds"), RETRY_AFTER.values(), ids=RETRY_AFTER)
async def test_how_long_a_busy_server_asks_to_wait(
    kube: Kube, server: Server, headers: dict[str, str], seconds: float
) -> None:
    server.answers = [(429, {"message": "too many requests"})]
    server.headers = headers
    with pytest.raises(KubeError) as raised:
        await kube.get("Secret", "team", "s")
    assert raised.value.retry_after_seconds == seconds


REFUSALS: dict[str, tuple[int, Json | str, tuple[int, str, str]]] = {
    "in the API's form": (
        403,
        {"message": "secrets is forbidden", "reason": "Forbidden"},
        (403, "secrets is forbidden", "Forbidden"),
    ),
    "by a proxy": (502, "<html>bad gateway</html>", (502, "<html>bad gateway</html>", "")),
    "by a proxy with something else in JSON": (503, '["busy"]', (503, '["busy"]', "")),
}


@pytest.mark.parametrize(("status", "body", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_carries_its_words(
    kube: Kube, server: Server, status: int, body: Json | str, expected: tuple[int, str, str]
) -> None:
    server.answers = [(status, body)]
    with pytest.raises(KubeError) as raised:
        await kube.get("Secret", "team", "s")
    assert (raised.value.status, str(raised.value), raised.value.reason) == expected


async def test_a_success_that_is_no_json_is_an_error(kube: Kube, server: Server) -> None:
    server.answers = [(200, "<html>please log in</html>")]
    with pytest.raises(KubeError) as raised:
        await kube.get("Secret", "team", "s")
    assert str(raised.value) == "the response of the API server is not JSON: <html>please log in</html>"


async def test_an_object_that_is_nested_deeply_hides_no_other(kube: Kube, server: Server) -> None:
    deep = json.dumps({"metadata": {"name": "deep"}, "spec": "SPEC"}).replace('"SPEC"', nest(9_000))
    other = {"metadata": {"name": "other"}}
    server.answers = [
        (200, f'{{"metadata": {{"resourceVersion": "7"}}, "items": [{deep}, {json.dumps(other)}]}}'),
        (200, deep),
    ]
    kept = json.loads(nest(MAX_LEVELS - 1, json.dumps(REPLACEMENT)))
    expected = {"metadata": {"name": "deep"}, "spec": kept}
    assert await kube.list("FineTuneJob", None) == Listing([expected, other], 7)
    assert await kube.get("FineTuneJob", "team", "deep") == expected


async def test_an_api_server_that_is_away_has_no_status(kube: Kube, server: Server) -> None:
    assert kube._api is not None
    kube._api.configuration.host = "http://127.0.0.1:9"
    with pytest.raises(KubeError) as raised:
        await kube.get("Secret", "team", "s")
    assert raised.value.status == 0
    assert str(raised.value).startswith("the API server cannot be reached: ")


async def test_an_api_server_that_does_not_answer_is_said_to_be_late(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "_timeout_seconds", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert kube._api is not None
        kube._api.configuration.host = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(KubeError) as raised:
            await kube.get("Secret", "team", "s")
    assert (raised.value.status, str(raised.value)) == (
        0,
        "the API server cannot be reached: no response within 0.2 s",
    )


async def test_it_is_used_inside_of_its_context() -> None:
    with pytest.raises(RuntimeError, match="outside of `async with`"):
        await Kube().get("Pod", "team", "a")


async def test_a_write_is_not_sent_on_a_kept_connection_after_a_pause(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does not run between the check of the fence and such a request, so no timer ends it."""
    seconds = 0.0
    fence = Fence(lambda: seconds)
    fence.open_until(60.0)

    @contextmanager
    def pause(_server: str) -> Iterator[SimpleNamespace]:
        nonlocal seconds
        seconds = 61.0
        yield SimpleNamespace()

    body = {"kind": "Job", "metadata": {"namespace": "team", "name": "tune"}}
    server.answers = [(200, body)] * 3
    write_config(tmp_path, monkeypatch, server.url)
    async with Kube(fence) as client:
        await client.create(body)
        monkeypatch.setattr("finetune_operator.metrics.measuring_request", pause)
        with pytest.raises(KubeError, match="no longer holds its Lease, so the request was not sent"):
            await client.create(body)
        assert await client.get("Job", "team", "tune") == body
    assert [request["method"] for request in server.asked] == ["POST", "GET"]


async def test_a_write_does_not_leave_a_replica_that_does_not_lead(kube: Kube, server: Server) -> None:
    kube._fence = Fence()
    kube._fence.close()
    body = {"kind": "Job", "metadata": {"namespace": "team", "name": "tune"}}
    for write in (
        kube.create(body),
        kube.apply(body),
        kube.delete("Job", "team", "tune", "uid-1"),
    ):
        with pytest.raises(KubeError) as raised:
            await write
        assert (raised.value.status, str(raised.value)) == (
            0,
            "this replica of the operator no longer holds its Lease, so the request was not sent",
        )
    server.answers = [(200, body)]
    assert await kube.get("Job", "team", "tune") == body
    assert [request["method"] for request in server.asked] == ["GET"]


async def test_the_api_server_ends_a_write_before_the_fence_closes(kube: Kube, server: Server) -> None:
    kube._fence = Fence(lambda: 100.0)
    kube._fence.open_until(107.25)
    body = {"kind": "Job", "metadata": {"namespace": "team", "name": "tune"}}
    server.answers = [(201, body), (200, body)]
    await kube.create(body)
    await kube.get("Job", "team", "tune")
    assert [request["query"].get("timeout") for request in server.asked] == ["7.250s", None]
