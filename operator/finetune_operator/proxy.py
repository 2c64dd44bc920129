"""The proxy for a server, from the environment."""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass


def find_proxy(url: str) -> str | None:
    """The proxy for an address, from HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
