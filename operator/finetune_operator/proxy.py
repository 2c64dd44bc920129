"""The proxy for a server, from the environment."""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def find_proxy(url: str) -> str | None:
    """The proxy for an address, from HTTPS_PROXY, HTTP_PROXY and NO_PROXY.

    An entry of NO_PROXY is a host or, with a port, one server of this host.
    """
    parts = urlsplit(url)
    # Without a user and password, and without the brackets of an IPv6 address, which NO_PROXY does not have.
    host = parts.hostname or ""
    servers = [host, f"{host}:{parts.port}"] if parts.port else [host]
    return None if any(map(proxy_bypass, servers)) else getproxies().get(parts.scheme)
