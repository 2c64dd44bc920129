"""Paths of files inside a folder, as listings and manifests name them: a name that leads out of its folder is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAX_SHOWN_CHARS = 200


class UnsafePathError(ValueError):
    """A listing or a manifest names a file with a path that could lead out of its folder; the message has the path and the reason."""


def check_relative_path(path: str) -> str:
    """Return the path of a file in a folder, with / between its parts.

    Raises:
        UnsafePathError: the path is empty or absolute, has an empty part, `.` or `..`, a backslash, or a control character.
    """
    problem = _find_problem(path)
    if problem is not None:
        raise UnsafePathError(f"{path[:_MAX_SHOWN_CHARS]!r}, which {problem}")
    return path


def is_relative_path(path: str) -> bool:
    """Whether `check_relative_path` allows the path."""
    return _find_problem(path) is None


def locate_inside(folder: Path, path: str) -> Path:
    """Return where a file is written in a folder, and make the folders between.

    Raises:
        UnsafePathError: as `check_relative_path`; or a link in the folder leads out of it.
    """
    target = folder / check_relative_path(path)
    # NB: checked before anything is made: mkdir follows links.
    if not target.resolve().is_relative_to(folder.resolve()):
        raise UnsafePathError(f"{path[:_MAX_SHOWN_CHARS]!r}, which leads out of its folder through a link")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _find_problem(path: str) -> str | None:
    if path.startswith("/"):
        return "is an absolute path"
    if "\\" in path:
        return "has a backslash"
    if _CONTROL.search(path):
        return "has a control character"
    parts = path.split("/")
    if ".." in parts:
        return "leads out of its folder"
    if "" in parts or "." in parts:
        return "has an empty part"
    return None
