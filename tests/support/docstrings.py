"""Finds docstrings that describe what is not there: `python -m support.docstrings FOLDER...`.

A rename leaves them behind. Ruff checks neither sections of arguments without types nor errors that a callee raises.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SECTION = re.compile(r"^(?P<section>Args|Raises):\n(?P<entries>(?:    .*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (?P<name>\w+):", re.MULTILINE)


class Stale(NamedTuple):
    """An entry of a docstring that names no parameter, or no error."""

    line: int
    function: str
    name: str


def find_stale_entries(source: str, classes: Collection[str]) -> list[Stale]:
    """Return the entries of a module's docstrings that name no parameter of their function, or no error.

    Args:
        source: of the module.
        classes: the names of all classes that the packages define or import.
    """
    stale_entries = (
        Stale(function.lineno, function.name, name)
        for function in ast.walk(ast.parse(source))
        if isinstance(function, _Function)
        for section, name in _list_entries(ast.get_docstring(function) or "")
        if name not in (_list_parameters(function) if section == "Args" else classes)
    )
    return sorted(stale_entries)


def list_classes(sources: Sequence[str]) -> set[str]:
    """Return the names that may be errors: those of Python, and what the modules define, import or assign."""
    names = set(dir(builtins))
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        match node:
            case ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in node.names)
            case ast.Assign():
                # Tuples of errors.
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _list_entries(docstring: str) -> Iterator[tuple[str, str]]:
    for section in _SECTION.finditer(docstring):
        for entry in _ENTRY.finditer(section["entries"]):
            yield section["section"], entry["name"]


def _list_parameters(function: _Function) -> set[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return {argument.arg for argument in every}


def main(folders: Sequence[str]) -> int:
    """Print the stale entries in the modules below folders; the exit code is 1 where there are any."""
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    classes, count = list_classes([*sources.values()]), 0
    for path, source in sources.items():
        for entry in find_stale_entries(source, classes):
            print(
                f"{path}:{entry.line}: the docstring of {entry.function} describes {entry.name}, which is not there"
            )
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
