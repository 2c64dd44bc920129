"""What kopf does besides calling the handlers."""

from __future__ import annotations

from typing import Any

import kopf
import pytest
from kopf._core.intents.causes import Activity

from finetune_operator.controller import watches


def test_kopf_compares_no_object_with_its_last_state() -> None:
    settings = kopf.OperatorSettings()
    watches.configure(settings)
    storage = settings.persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "tune", "labels": {"a": "b"}}, "spec": {"nodes": 2}})
    assert (storage.build(body=body), storage.fetch(body=body)) == ({}, None)


def test_kopf_holds_few_objects_at_once_when_a_watch_begins() -> None:
    settings = kopf.OperatorSettings()
    watches.configure(settings)
    assert (settings.watching.chunk_size, settings.queueing.idle_timeout) == (100, 0.1)


@pytest.mark.parametrize("has_network_policies", [False, True])
def test_network_policies_are_watched_if_the_operator_creates_them(*, has_network_policies: bool) -> None:
    no_handler: Any = None
    handlers = watches.Handlers(*[no_handler] * 4)
    registry = watches.build_registry(handlers, has_network_policies=has_network_policies)
    selectors = [handler.selector for handler in registry._watching.get_all_handlers()]
    plurals = {selector.any_name or selector.plural for selector in selectors if selector}
    assert ("networkpolicies" in plurals) == has_network_policies
    assert {"jobs", "pods", "services", "configmaps"} <= plurals


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        pytest.param(None, "http://proxy:3128", id="of the environment"),
        pytest.param("http://other:3128", "http://other:3128", id="of the kubeconfig"),
    ],
)
def test_watches_use_a_proxy(configured: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = kopf.ConnectionInfo(server="https://kubernetes:6443", proxy_url=configured)
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: info)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "")
    no_handler: Any = None
    handlers = watches.Handlers(*[no_handler] * 4)
    registry = watches.build_registry(handlers, has_network_policies=True)
    (handler,) = registry._activities.get_handlers(activity=Activity.AUTHENTICATION)
    login: Any = handler.fn
    assert login().proxy_url == expected
