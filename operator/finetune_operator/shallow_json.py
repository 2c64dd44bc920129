"""Parses JSON of the API server, without what is nested so deeply that recursive functions of Python raise a RecursionError.

The API server stores objects with thousands of levels, since the pod templates of a spec are not in its schema. NB: one such object in a
list or a watch must not keep the operator from reading the others. Every level counts: the store compares objects, and copies them.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_LEVELS = 100
"""Levels of an object that are kept. Specs and pod templates have fewer than 30."""
REPLACEMENT = f"nested more than {MAX_LEVELS} levels deep"
"""Stands for what was nested deeper. The API server refuses it in a pod, where no text is expected."""
LEVELS_ABOVE_ITEMS = 2
"""Levels of a list around each object: the list, and its items."""
LEVELS_ABOVE_EVENT = 1
"""Levels of a watch event around its object."""

# A string as a whole, since it may contain brackets, or a bracket.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)


_CONTAINERS = (dict, list)


def parse(text: str | bytes, *, levels_above: int = 0) -> Any:
    """The value of a JSON text; what is nested too deeply is replaced by REPLACEMENT.

    Args:
        levels_above: levels around an object that do not count, so that a list and a watch yield equal objects.

    Raises:
        ValueError: the text is not JSON.
    """
    max_levels = MAX_LEVELS + levels_above
    try:
        value = json.loads(text)
    except RecursionError:
        value = json.loads(_cut_text(text if isinstance(text, str) else text.decode(), max_levels))
    _cut_value(value, max_levels)
    return value


def _cut_text(text: str, max_levels: int) -> str:
    """Replace what is nested too deeply in a text, without recursion."""
    kept_parts: list[str] = []
    level = start = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "{" | "[":
                if level == max_levels:
                    kept_parts += (text[start : token.start()], json.dumps(REPLACEMENT))
                level += 1
            case "}" | "]":
                level -= 1
                if level == max_levels:
                    start = token.end()
    return "".join([*kept_parts, text[start:]])


def _cut_value(value: Any, max_levels: int) -> None:
    """Replace what is nested too deeply in a parsed value, level by level."""
    containers = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(max_levels - 1):
        containers = [child for parent in containers for child in _list_children(parent)]
        if not containers:
            return
    for container in containers:
        for key, child in [*(container.items() if isinstance(container, dict) else enumerate(container))]:
            if isinstance(child, _CONTAINERS):
                container[key] = REPLACEMENT


def _list_children(container: Any) -> list[Any]:
    children = container.values() if isinstance(container, dict) else container
    # NB: this runs for each value of each response, and `dict | list` would build a type each time.
    return [child for child in children if isinstance(child, _CONTAINERS)]
