"""A stand-in for the open-source server of Unity Catalog: tables, and temporary credentials for their files."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from standins.databricks.unity import Refusal
from support.http_server import Answer, Request, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from standins.databricks.tables import Json, Tables

_API = "/api/2.1/unity-catalog"
"""The only one that it has: Databricks has the credentials under /api/2.0 too."""


@contextmanager
def running(tables: Tables, token: str = "") -> Iterator[str]:
    """A server on loopback for the time of a block; yields its address.

    Args:
        token: what a login must have; empty for a server that asks for none.
    """
    with serving(lambda request: _respond(tables, token, request)) as address:
        yield address


def _respond(tables: Tables, token: str, request: Request) -> Answer:
    try:
        return Answer(200, _ask(tables, token, request))
    except Refusal as refusal:
        return Answer(refusal.status, refusal.body, {"Content-Type": "application/json"})


def _ask(tables: Tables, token: str, request: Request) -> Json:
    path = unquote(urlsplit(request.target).path)
    if token and request.headers.get("Authorization") != f"Bearer {token}":
        raise Refusal(401, "UNAUTHENTICATED", "No authorization found.")
    if request.method == "GET" and path.startswith(f"{_API}/tables/"):
        return tables.get(path.removeprefix(f"{_API}/tables/"))
    if (request.method, path) == ("POST", f"{_API}/temporary-table-credentials"):
        return tables.credentials(json.loads(request.body))
    raise Refusal(404, "NOT_FOUND", f"{request.method} {path} is not of this API.")
