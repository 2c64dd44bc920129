"""Which servers are reached through the proxy of the environment."""

from __future__ import annotations

import pytest

from finetune_operator.proxy import find_proxy

PROXY = "http://proxy:3128"
# The address, NO_PROXY, and whether the proxy is used.
ADDRESSES: dict[str, tuple[str, str, bool]] = {
    "another host": ("https://mlflow.team:443", "kubernetes", True),
    "a host": ("https://kubernetes:6443", "kubernetes", False),
    "a host with another port": ("https://kubernetes:6443", "kubernetes:443", True),
    "a host with this port": ("https://kubernetes:6443", "kubernetes:6443", False),
    "a domain": ("https://api.cluster.local", ".cluster.local", False),
    "an IPv6 address": ("https://[fd00:10:96::1]:443", "fd00:10:96::1", False),
    "a login in the address": ("https://me:secret@example.com", "example.com", False),
    "another scheme": ("http://mlflow.team", "", False),
}


@pytest.mark.parametrize(("address", "no_proxy", "is_proxied"), ADDRESSES.values(), ids=ADDRESSES)
def test_no_proxy_names_hosts(
    address: str, no_proxy: str, is_proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", no_proxy)
    assert find_proxy(address) == (PROXY if is_proxied else None)
