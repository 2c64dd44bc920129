"""The registry: one folder of images for all clusters of this machine, served by each cluster to its nodes."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock

from cluster import binaries
from cluster.binaries import say
from cluster.process import run
from support.cache import cache
from support.ports import listens
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

# This name has no DNS record: containerd's configuration maps it to an address.
NAME = "registry.finetune.local"
# NB: buildah remembers by the address of a registry which layers it has. Under another address it would compress
# gigabytes again to learn that they are there.
_PUSH_HOST, _PUSH_PORT = "127.70.84.1", 5000


def storage() -> Path:
    """The folder of images."""
    return cache() / "registry"


def reference(image: str, tag: str) -> str:
    """What a pod calls an image, in every cluster the same."""
    return f"{NAME}/{image}:{tag}"


def has(image: str, tag: str) -> bool:
    """Whether an image was pushed; needs no registry to run."""
    repositories = storage() / "docker" / "registry" / "v2" / "repositories"
    return (repositories / image / "_manifests" / "tags" / tag / "current" / "link").exists()


def configuration(address: str, folder: Path) -> dict[str, object]:
    """The configuration of a registry that listens at `address` and keeps images in a folder."""
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(folder)},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": address},
    }


def server(address: str, directory: Path, log: Path, images: Path | None = None) -> Process:
    """A registry, not started yet, with its configuration in `directory`; of all clusters' images, or of a folder's."""
    program = binaries.path("registry")
    file = directory / "registry.yaml"
    images = images or storage()
    file.write_text(json.dumps(configuration(address, images), indent=1) + "\n")
    images.mkdir(parents=True, exist_ok=True)
    return Process("registry", [str(program), "serve", str(file)], log, {"OTEL_TRACES_EXPORTER": "none"})


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """A context with a registry on the loopback interface, one at a time on this machine; yields its address."""
    address = f"{_PUSH_HOST}:{_PUSH_PORT}"
    storage().mkdir(parents=True, exist_ok=True)
    with FileLock(storage() / "push.lock"):
        process = server(address, directory, directory / "registry.log")
        process.start()
        try:
            wait_for("the registry", lambda: listens(_PUSH_PORT, _PUSH_HOST), 20, process)
            yield address
        finally:
            process.stop()


def mirrors(folder: Path, address: str) -> Path:
    """Write containerd's configuration of the registry at `address` into a new folder; returns the folder."""
    file = folder / NAME / "hosts.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'server = "http://{address}"\n[host."http://{address}"]\ncapabilities = ["pull", "resolve"]\n'
    )
    return folder


def pull(images: Sequence[str], hosts: Path, references: Iterable[str], name: str) -> None:
    """Pull what a containerd does not have.

    Args:
        images: the command that works on its images.
        hosts: its configuration of registries.
        references: what it is to have.
        name: what it is called.
    """
    there = run(*images, "list", "--quiet").split()
    for reference in (each for each in references if each not in there):
        began = time.monotonic()
        run(*images, "pull", "--hosts-dir", str(hosts), reference, timeout=900)
        say(f"{name} has {reference} ({time.monotonic() - began:.0f} s)")
