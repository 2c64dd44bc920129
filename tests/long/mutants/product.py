"""The modules of the product: where their sources are, and what can be put into them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from long.mutants.operators import Candidate, Function, list_candidates, list_functions

PACKAGES = {
    "finetune_crds": "crds",
    "finetune_operator": "operator",
    "finetune_trainer": "trainer_image",
}
"""The packages of the product, and the folders that they are in."""


def source_path(root: Path, module: str) -> Path:
    """The file of a module."""
    folder = root / PACKAGES[module.partition(".")[0]] / module.replace(".", "/")
    package = folder / "__init__.py"
    return package if package.exists() else folder.with_suffix(".py")


def list_modules(root: Path) -> list[str]:
    """All modules of the product."""
    modules = []
    for package, folder in PACKAGES.items():
        for path in (root / folder / package).rglob("*.py"):
            parts = path.relative_to(root / folder).with_suffix("").parts
            modules.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(modules)


@dataclass(frozen=True)
class Module:
    """A module: its source, and its functions by qualified name."""

    source: str
    functions: dict[str, Function]

    def candidates(self, function: str) -> list[Candidate]:
        """The faults that can be put into one of its functions; none where it has no such function."""
        node = self.functions.get(function)
        return [] if node is None else list_candidates(node)


def read_module(root: Path, module: str) -> Module:
    """Read a module.

    Raises:
        FileNotFoundError: there is no such module.
    """
    source = source_path(root, module).read_text(encoding="utf-8")
    return Module(source, list_functions(ast.parse(source)))
