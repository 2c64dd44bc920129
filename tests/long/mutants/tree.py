"""A throw-away copy of the working tree, in which product code can be changed, and which has an environment of its own.

The environment holds links to the packages of the one that runs this, apart from the product's: these are imported from
the copy, also by subprocesses, whose PYTHONPATH may be another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from long.mutants.product import PACKAGES, source_path

_EDITABLE = "__editable__"
# The file that puts the product of a copy on the path; an environment that is copied may be a copy's.
_PRODUCT = "product.pth"
_PACKAGE = Path(__file__).parent
_NOT_COPIED = shutil.ignore_patterns("__pycache__")


class Tree:
    """A copy of the working tree."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def python(self) -> Path:
        """The interpreter that imports the product from this copy."""
        return self.root / ".venv" / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for a process that works on this copy."""
        paths = [self.root / "tests", *(self.root / folder for folder in PACKAGES.values())]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def check_imports(self) -> None:
        """Check that the product is imported from this copy, with its PYTHONPATH and without.

        Raises:
            CalledProcessError: it is not.
        """
        code = "import sys, importlib as i; [sys.exit(m.__file__) for m in map(i.import_module, sys.argv[2:]) if not m.__file__.startswith(sys.argv[1])]"
        for environment in (self.environment, {}):
            command = [str(self.python), "-c", code, str(self.root), *PACKAGES]
            subprocess.run(command, env=environment, check=True, cwd="/")

    def write(self, module: str, source: str) -> None:
        """Replace the source of a module."""
        path = source_path(self.root, module)
        path.write_text(source, encoding="utf-8")
        # NB: Python takes a compiled file for fresh where size and second of the source are as before.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    @contextmanager
    def replace_source(self, module: str, source: str) -> Iterator[None]:
        """Replace the source of a module for the time of a block."""
        original = source_path(self.root, module).read_text(encoding="utf-8")
        self.write(module, source)
        try:
            yield
        finally:
            self.write(module, original)


def copy_tree(source: Path, target: Path) -> Tree:
    """Copy the files that git knows of, with their uncommitted changes, into an empty folder, with an environment."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    names = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, names.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)
    # NB: an older commit has no plugins of its own for the recording.
    shutil.copytree(_PACKAGE, target / "tests" / "long" / "mutants", dirs_exist_ok=True, ignore=_NOT_COPIED)
    # Tests of the documentation ask git which files there are.
    _git(target, "init", "--quiet")
    _git(target, "add", "--all")
    _link_environment(target / ".venv")
    tree = Tree(target)
    tree.check_imports()
    return tree


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _link_environment(target: Path) -> None:
    source, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    linked = target / packages.relative_to(source)
    linked.mkdir(parents=True)
    for path in packages.iterdir():
        if not path.name.startswith(_EDITABLE) and path.name not in ("__pycache__", _PRODUCT):
            (linked / path.name).symlink_to(path)
    roots = [str(target.parent / folder) for folder in PACKAGES.values()]
    (linked / _PRODUCT).write_text("\n".join(roots) + "\n", encoding="utf-8")
    shutil.copy2(source / "pyvenv.cfg", target / "pyvenv.cfg")
    (target / "bin").mkdir()
    for path in (source / "bin").iterdir():
        _link_program(path, target / "bin" / path.name)


def _link_program(source: Path, target: Path) -> None:
    """A program of the environment: scripts begin with the path of the interpreter, which is that of the copy."""
    content = source.read_bytes()
    prefix = os.fsencode(sys.prefix)
    if source.is_symlink() or not content.startswith(b"#!" + prefix):
        target.symlink_to(source.readlink() if source.is_symlink() else source)
    else:
        target.write_bytes(content.replace(prefix, os.fsencode(target.parent.parent), 1))
        target.chmod(0o755)
