"""Probes: a call at the beginning of a function that notes which test runs it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from long.mutants.operators import Function, list_functions

CURRENT_TEST = "MUTANTS_CURRENT_TEST"
"""The variable with the path of the file in which the process of pytest keeps the name of the test that runs."""

_PROBE = """
def _note_coverage(mutant, _notes={}):
    import os, pathlib
    try:
        process = os.getpid()
        path = _notes.get(process)
        if path is None:
            path = os.environ.get("VARIABLE", "")
            parent = process
            while not os.path.exists(path) and parent > 1:
                path = os.path.join("FOLDER", "current", str(parent))
                parent = int(pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            _notes[process] = path
        changed = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
        if _notes.get((process, mutant)) != changed:
            _notes[process, mutant] = changed
            test = pathlib.Path(path).read_text() if changed else "?"
            with open(os.path.join("FOLDER", "hits", mutant), "a") as file:
                file.write(test + "\\n")
    except OSError:
        pass
    return True
_note_coverage._dynamo_marked_constant = True
"""
"""Code of each module that has probes: it needs nothing that a process may lack, and is a constant for torch.compile.

NB: a process may be older than the test that uses it (a JVM and its Python workers), or have an environment without the
variable: the file has the test that runs now, and the parents of the process lead to the one of pytest.
"""


def insert_probes(source: str, mutants: Mapping[str, str], folder: str) -> str:
    """The source of a module with a probe in each function of some mutants.

    Args:
        mutants: the qualified name of the function of each mutant, by the mutant's name.
        folder: where to note the tests: `hits/<mutant>` has a line for each.
    """
    tree = ast.parse(source)
    functions = list_functions(tree)
    lines = source.splitlines(keepends=True)
    by_function: dict[str, list[str]] = {}
    for mutant, name in mutants.items():
        by_function.setdefault(name, []).append(mutant)
    starts = {name: _first_statement(functions[name]) for name in by_function}
    for name in sorted(by_function, key=lambda name: -starts[name][0]):
        number, column = starts[name]
        line = lines[number - 1]
        calls = "; ".join(f"_note_coverage({mutant!r})" for mutant in by_function[name])
        before, after = line.encode()[:column].decode(), line.encode()[column:].decode()
        separator = f"\n{before}" if not before.strip() else "; "
        lines[number - 1] = f"{before}{calls}{separator}{after}"
    end = _end_of_future_imports(tree)
    probe = _PROBE.replace("VARIABLE", CURRENT_TEST).replace("FOLDER", folder)
    return "".join([*lines[:end], probe, *lines[end:]])


def _first_statement(function: Function) -> tuple[int, int]:
    """The line and column of the first statement after the docstring, with its decorators."""
    body = function.body
    first = body[1] if len(body) > 1 and _is_docstring(body[0]) else body[0]
    if isinstance(first, Function | ast.ClassDef) and first.decorator_list:
        return first.decorator_list[0].lineno, first.col_offset
    return first.lineno, first.col_offset


def _end_of_future_imports(tree: ast.Module) -> int:
    """The number of the last line of the module's docstring and its imports from `__future__`."""
    end = 0
    for index, node in enumerate(tree.body):
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if is_future or (index == 0 and _is_docstring(node)):
            end = node.end_lineno or end
    return end


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
