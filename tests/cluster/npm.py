"""The programs that run on Node.js, installed by npm once and kept by what their manifest says."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from cluster import packages
from cluster.binaries import say
from cluster.packages import SEARCHED, Package
from cluster.paths import PACKAGE, ClusterError
from support.cache import cache

MANIFEST = PACKAGE / "npm" / "package.json"
NODE = (Package("nodejs", ("node",)), Package("npm", ("npm",)))
# No lock file: it would name the registry of whoever wrote it. No scripts of packages, none of which these programs need.
_INSTALL = (
    "install",
    "--no-package-lock",
    "--omit=dev",
    "--ignore-scripts",
    "--no-audit",
    "--no-fund",
    "--silent",
)


def program(name: str) -> list[str]:
    """The command of a program of the manifest's packages, installed if it is missing.

    Raises:
        ClusterError: npm cannot be installed, or cannot install the packages.
    """
    packages.ensure(*NODE)
    executable = _folder() / "node_modules" / ".bin" / name
    if not executable.exists():
        (cache() / "npm").mkdir(parents=True, exist_ok=True)
        with FileLock(cache() / "npm" / ".lock"):
            if not executable.exists():
                _install(_folder())
    return [str(_found("node")), str(executable)]


def _folder() -> Path:
    return cache() / "npm" / hashlib.sha256(MANIFEST.read_bytes()).hexdigest()[:16]


def _install(folder: Path) -> None:
    say("installing Azurite with npm (about 1 min the first time)")
    building = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    shutil.copyfile(MANIFEST, building / MANIFEST.name)
    done = subprocess.run(
        [str(_found("npm")), *_INSTALL], cwd=building, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        shutil.rmtree(building, ignore_errors=True)
        raise ClusterError(f"npm cannot install {MANIFEST}:\n{done.stderr.strip()[-2000:]}")
    building.rename(folder)


def _found(name: str) -> str | None:
    return shutil.which(name, path=SEARCHED)
