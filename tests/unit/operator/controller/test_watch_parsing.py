"""kopf reads lists and watches with objects that are nested deeply."""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from kopf import OperatorSettings
from kopf._cogs.clients import api

from finetune_operator.controller.watch_parsing import parse_deep_objects
from finetune_operator.shallow_json import MAX_LEVELS, REPLACEMENT
from unit.operator.test_shallow_json import nest

LOG: Any = logging.getLogger(__name__)
DEEP = nest(9_000)
KEPT = json.loads(nest(MAX_LEVELS, json.dumps(REPLACEMENT)))


async def answer(request: web.Request) -> web.Response:
    text = {"/list": f'{{"items": [{DEEP}]}}', "/watch": f'{{"type": "ADDED", "object": {DEEP}}}\n{{}}\n'}
    return web.Response(text=text[request.path], content_type="application/json")


async def test_deep_objects_are_cut_in_lists_and_in_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "get", api.get)
    monkeypatch.setattr(api, "json", json)
    parse_deep_objects()
    app = web.Application()
    app.router.add_get("/{path}", answer)
    async with TestServer(app) as server, ClientSession(server.make_url("")) as session:

        async def request(*, method: str, url: str, **_: Any) -> Any:
            return await session.request(method, url)

        monkeypatch.setattr(api, "request", request)
        settings = OperatorSettings()
        listed = await api.get("/list", settings=settings, logger=LOG)
        events = [event async for event in api.stream("/watch", settings=settings, logger=LOG)]
    assert (listed, events) == ({"items": [KEPT]}, [{"type": "ADDED", "object": KEPT}, {}])


def test_the_client_of_kopf_uses_of_json_what_is_replaced() -> None:
    source = inspect.getsource(api)
    assert source.count("json.") == source.count("json.loads(") == 1
