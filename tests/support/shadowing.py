"""Finds local names that shadow an import or a function of their module: `python -m support.shadowing FOLDER...`.

A reader who knows the function takes the local for it. Ruff checks the names of Python's builtins alone.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Shadow(NamedTuple):
    """A local name that shadows a name of its module."""

    line: int
    function: str
    name: str


def find_shadows(source: str) -> list[Shadow]:
    """Return the locals and parameters of a module that shadow an import or a function of it, by line.

    `_` is a name for values that are not used, and shadows nothing.
    """
    tree = ast.parse(source)
    module_names = {name for node in tree.body for name in _list_module_names(node)} - {"_"}
    shadows = {
        Shadow(line, function.name, name)
        for function in ast.walk(tree)
        if isinstance(function, _Function)
        for name, line in _list_locals(function)
        if name in module_names
    }
    return sorted(shadows)


def _list_module_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module imports, or of the function that it defines."""
    match node:
        case ast.ImportFrom(module="__future__"):
            return
        case ast.Import() | ast.ImportFrom():
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name
        case ast.If():
            # Imports for type checkers.
            for child in node.body:
                yield from _list_module_names(child)


def _list_locals(function: _Function) -> Iterator[tuple[str, int]]:
    """Yield the parameters of a function and the names that its body binds, without those of functions within."""
    pending: list[ast.AST] = [function.args, *function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif (isinstance(node, ast.ExceptHandler) and node.name) or (
            isinstance(node, ast.MatchAs | ast.MatchStar) and node.name
        ):
            yield node.name, node.lineno
        elif isinstance(node, _Function):
            yield node.name, node.lineno
            continue
        elif isinstance(node, ast.ClassDef):
            continue
        pending.extend(ast.iter_child_nodes(node))


def main(folders: Sequence[str]) -> int:
    """Print the shadows in the modules of folders; the exit code is 1 if there are any."""
    count = 0
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        for shadow in find_shadows(path.read_text(encoding="utf-8")):
            print(f"{path}:{shadow.line}: {shadow.name} in {shadow.function} shadows a name of the module")
            count += 1
    if count:
        print(f"{count} local names shadow an import or a function of their module: rename them")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
