"""The images, unpacked once for all nodes of all clusters of this machine: a node begins with links to their files.

NB: unpacking is what costs a node time: four gigabytes in a hundred thousand files. overlayfs never writes to a layer, so
nodes may have the files of its layers in common.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from cluster import builder, registry
from cluster.process import run
from support.cache import cache
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTAINERD = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
"""


def store() -> Path:
    """The folder of a containerd that runs no container."""
    return cache() / "unpacked"


def ensure(references: Sequence[str]) -> None:
    """Unpack images from the registry, and forget all others."""
    with _lock(), tempfile.TemporaryDirectory(prefix="unpacked-") as name:
        directory = Path(name)
        with registry.serving(directory) as address, _containerd(directory) as images:
            hosts = registry.mirrors(directory / "certs.d", address)
            registry.pull(images, hosts, references, "this machine")
            there = run(*images, "list", "--quiet").split()
            if old := [each for each in there if each not in references]:
                run(*images, "remove", "--sync", *old, timeout=300)


def seed(root: Path) -> None:
    """Make the folder of a node's containerd, with all that is unpacked; nothing if nothing is."""
    with _lock():
        if not store().exists():
            return
        root.parent.mkdir(parents=True, exist_ok=True)
        run("cp", "--archive", "--link", str(store()), str(root), timeout=300)
        for database in root.rglob("*.db"):
            # A database is written in place.
            copy = database.with_suffix(".copy")
            shutil.copy2(database, copy)
            copy.replace(database)


@contextmanager
def _containerd(directory: Path) -> Iterator[list[str]]:
    """A context with a containerd over the store; yields the command that works on its images."""
    socket = directory / "containerd.sock"
    file = directory / "containerd.toml"
    file.write_text(CONTAINERD.format(root=store(), state=directory / "state", socket=socket))
    command = [*builder.ASIDE, "containerd", "--config", str(file)]
    process = Process("containerd", command, directory / "containerd.log")
    images = ["ctr", "--address", str(socket), "--namespace", "k8s.io", "images"]
    process.start()
    try:
        wait_for("containerd", lambda: run(*images, "list", check=False) != "", 30, process)
        yield images
    finally:
        process.stop()


def _lock() -> FileLock:
    cache().mkdir(parents=True, exist_ok=True)
    return FileLock(cache() / "unpacked.lock")
