"""Lets kopf read objects that are nested deeply. kopf itself would end the operator with a RecursionError."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from kopf._cogs.clients import api

from finetune_operator import shallow_json

_parse_list = partial(shallow_json.parse, levels_above=shallow_json.LEVELS_ABOVE_ITEMS)
_parse_event = partial(shallow_json.parse, levels_above=shallow_json.LEVELS_ABOVE_EVENT)


def parse_deep_objects() -> None:
    """Let kopf parse lists and watch events without what is nested too deeply."""
    # NB: kopf has no setting for it. Of json, its client uses only `loads`, for the lines of a watch.
    api.json = SimpleNamespace(loads=_parse_event)  # type: ignore[assignment, attr-defined]
    api.get = _get


async def _get(url: str, **arguments: Any) -> Any:
    """Read a list as kopf does, but for the parser."""
    response = await api.request(method="get", url=url, **arguments)
    async with response:
        return await response.json(loads=_parse_list)
