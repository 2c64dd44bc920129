"""A corpus that every machine has: the docstrings of Python's standard library and installed packages.

`python corpus.py URL [--rows 12000]` reads the sources on sys.path with `ast`, importing none of them, and writes
Parquet files to a folder or to s3://bucket/folder. The columns:

    id           which object, and where it was seen: the same object seen twice has two ids
    module       the module it was seen in
    instruction  a question: What does json.JSONDecoder do?
    answer       its docstring's first paragraphs, the whole of a module's; "" where there is none
    quality      0 to 1, how much the answer looks like prose that answers the question: see `quality`
    kind         what the answer is about, to be guessed from it: module, class or function
    other_kind   a kind that it is not

It is raw on purpose. What a package re-exports is there twice under its public name, some objects have no
docstring, and some modules have a very long one: there is something to filter, deduplicate and drop.

With `--preferences URL` it also writes, for DPO, what of these rows answers well, to another folder:

    prompt       the question
    chosen       the answer
    rejected     the same words in an order that makes no sense

The same sources give the same rows.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import sysconfig
import time
import warnings
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROWS = 12_000
FILES = 4
# No package says more than this: some are generated, and repeat themselves.
ROWS_OF_PACKAGE = 500
# Of the public objects without a docstring, one in so many is kept, with an empty answer.
UNDOCUMENTED = 12
ENOUGH_CHARS = 160
KINDS = ("module", "class", "function")
PREFERENCES = 2_000
GOOD = 0.8
PREFERRED_CHARS = range(40, 600)
SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "turtledemo", "ensurepip", "_vendor", "vendored"}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Row:
    """One row of the corpus."""

    id: str
    module: str
    instruction: str
    answer: str
    quality: float
    kind: str
    other_kind: str


@dataclass(frozen=True)
class Preference:
    """A question with an answer and a worse one."""

    prompt: str
    chosen: str
    rejected: str


@dataclass
class Package:
    """A top-level module or package, parsed."""

    modules: dict[str, ast.Module] = field(default_factory=dict)
    public: dict[str, str] = field(default_factory=dict)  # where an object is defined -> its public name
    exports: list[tuple[str, str]] = field(
        default_factory=list
    )  # (module that exports it, where it is defined)


def main(arguments: list[str]) -> int:
    """Write the corpus and say what is in it."""
    parser = argparse.ArgumentParser(description="Write a corpus of Python's docstrings as Parquet.")
    parser.add_argument("url", help="folder, or s3://bucket/folder")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows to write at most (default: %(default)s)")
    parser.add_argument("--preferences", metavar="URL", help="folder, or s3://bucket/folder, for preferences")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    examples = list(islice(rows(roots()), options.rows))
    write(examples, options.url)
    distinct = len({(row.instruction, row.answer) for row in examples})
    empty = sum(not row.answer for row in examples)
    print(
        f"corpus: {len(examples)} rows, {len(examples) - distinct} of them duplicates, {empty} without an answer, "
        f"in {options.url} after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    if options.preferences:
        pairs = list(islice(preferences(examples), PREFERENCES))
        write(pairs, options.preferences)
        print(f"preferences: {len(pairs)} rows in {options.preferences}", flush=True)
    return 0


def roots() -> list[Path]:
    """The standard library, then the folder that packages are installed into."""
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), *dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib"))]


def rows(folders: Iterable[Path]) -> Iterator[Row]:
    """The rows of every package in these folders, in the order of their names."""
    for folder in folders:
        for top in sorted(folder.iterdir(), key=lambda path: path.name):
            name = top.stem if top.suffix == ".py" else top.name
            if name.isidentifier() and not name.startswith("_") and name not in SKIPPED:
                yield from islice(rows_of(parse(top)), ROWS_OF_PACKAGE)


def parse(top: Path) -> Package:
    """Parse the files of a module or package, and find out under which names it offers its objects."""
    package = Package()
    files = (
        [top] if top.suffix == ".py" else sorted(top.rglob("*.py")) if (top / "__init__.py").exists() else []
    )
    for file in files:
        inner = file.relative_to(top.parent).with_suffix("").parts
        if SKIPPED.intersection(inner) or any(part.startswith(("_", "test_")) for part in inner[:-1]):
            continue
        tree = _syntax(file)
        if tree is not None:
            is_package = inner[-1] == "__init__"
            module = ".".join(inner[:-1] if is_package else inner)
            package.modules[module] = tree
            if is_package:
                _collect_exports(package, module, tree)
    return package


def rows_of(package: Package) -> Iterator[Row]:
    """The rows of a package: its modules and their objects, then what it re-exports."""
    where: dict[str, Row] = {}
    for module, tree in package.modules.items():
        documentation = ast.get_docstring(tree)
        if documentation:
            yield _row(module, module, f"What is the module {module} for?", documentation, "module")
        for path, definition in _objects(tree, module):
            documentation = ast.get_docstring(definition) or ""
            if not documentation and crc32(path.encode()) % UNDOCUMENTED:
                continue
            kind = "class" if isinstance(definition, ast.ClassDef) else "function"
            question = _question(_public(package, path), kind)
            where[path] = _row(path, module, question, _opening(documentation), kind)
            yield where[path]
    for module, path in package.exports:
        if path in where:
            yield replace(where[path], id=f"{module}:{path}", module=module)


def quality(answer: str) -> float:
    """How much an answer looks like prose that answers a question: the mean of six checks, each 0 or 1.

    It begins with a capital letter; its first sentence ends; it has at least eight words; it has at most 1,200
    characters; at least 70% of its characters are letters or spaces; it is no doctest, table or list of parameters.
    """
    if not answer:
        return 0.0
    prose = sum(character.isalpha() or character.isspace() for character in answer)
    checks = (
        answer[0].isupper(),
        re.search(r"[.!?](\s|$)", answer) is not None,
        len(answer.split()) >= 8,
        len(answer) <= 1200,
        prose >= 0.7 * len(answer),
        re.search(r">>>|:param|@param|^\s*(Args|Parameters)\b|-{4}|={4}|\|", answer, re.MULTILINE) is None,
    )
    return round(sum(checks) / len(checks), 3)


def preferences(examples: Iterable[Row]) -> Iterator[Preference]:
    """A preference of each good answer that is neither short nor long, over its own words in another order."""
    for row in examples:
        if row.quality >= GOOD and len(row.answer) in PREFERRED_CHARS:
            words = row.answer.split()
            # By a hash of their own each: the order makes no sense, and is the same on every machine.
            shuffled = sorted(words, key=lambda word: crc32(f"{row.instruction} {word}".encode()))
            if shuffled != words:
                yield Preference(row.instruction, row.answer, " ".join(shuffled))


def write(records: Sequence[Row] | Sequence[Preference], url: str) -> None:
    """Write rows of one kind as Parquet files to a folder, replacing what an earlier run wrote there."""
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, folder = fsspec.core.url_to_fs(url)
    filesystem.makedirs(folder, exist_ok=True)
    names = [column.name for column in fields(records[0])]
    size = -(-len(records) // FILES)
    for number in range(FILES):
        part = records[number * size : (number + 1) * size]
        table = pa.table({name: [getattr(row, name) for row in part] for name in names})
        with filesystem.open(f"{folder}/part-{number:05}.parquet", "wb") as file:
            pq.write_table(table, file)


def _syntax(file: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        # NB: other people's invalid escapes are no concern of ours.
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            return None


def _collect_exports(package: Package, module: str, tree: ast.Module) -> None:
    """`from .decoder import JSONDecoder` in json/__init__.py makes json.JSONDecoder its public name."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module:
            for alias in statement.names:
                if not (alias.asname or alias.name).startswith("_"):
                    path = f"{module}.{statement.module}.{alias.name}"
                    package.public.setdefault(path, f"{module}.{alias.asname or alias.name}")
                    package.exports.append((module, path))


def _objects(tree: ast.Module | ast.ClassDef, inside: str) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            path = f"{inside}.{node.name}"
            yield path, node
            if isinstance(node, ast.ClassDef):
                yield from _objects(node, path)


def _public(package: Package, path: str) -> str:
    """The public name of an object, or of the class that holds it."""
    if path in package.public:
        return package.public[path]
    holder, _, name = path.rpartition(".")
    return f"{package.public[holder]}.{name}" if holder in package.public else path


def _question(name: str, kind: str) -> str:
    return f"What is {name} for?" if kind == "class" else f"What does {name} do?"


def _opening(documentation: str) -> str:
    """The first paragraphs, until there is enough to say something."""
    text = ""
    for paragraph in re.split(r"\n\s*\n", documentation):
        text = f"{text}\n\n{paragraph}".strip()
        if len(text) >= ENOUGH_CHARS:
            break
    return text


def _row(path: str, module: str, instruction: str, answer: str, kind: str) -> Row:
    false_kinds = [false_kind for false_kind in KINDS if false_kind != kind]
    false_kind = false_kinds[crc32(path.encode()) % len(false_kinds)]
    return Row(path, module, instruction, answer.strip(), quality(answer.strip()), kind, false_kind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
