"""The registry: one folder of images for all clusters of this machine, served by each cluster to its nodes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster import binaries
from support.cache import cache
from support.ports import free_port, listens
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# This name has no DNS record: containerd's configuration maps it to an address.
NAME = "registry.finetune.local"


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


def configuration(address: str) -> dict[str, object]:
    """The configuration of a registry that listens at `address`."""
    return {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(storage())},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": address},
    }


def server(address: str, directory: Path, log: Path) -> Process:
    """A registry, not started yet, with its configuration in `directory`."""
    program = binaries.ensure("registry")["registry"]
    file = directory / "registry.yaml"
    file.write_text(json.dumps(configuration(address), indent=1) + "\n")
    storage().mkdir(parents=True, exist_ok=True)
    return Process("registry", [str(program), "serve", str(file)], log, {"OTEL_TRACES_EXPORTER": "none"})


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """A context with a registry on the loopback interface; yields its address."""
    port = free_port()
    process = server(f"127.0.0.1:{port}", directory, directory / "registry.log")
    process.start()
    try:
        wait_for("the registry", lambda: listens(port), 20, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.stop()


def mirror(address: str) -> str:
    """Containerd's configuration of the registry (a hosts.toml)."""
    return f'server = "http://{address}"\n[host."http://{address}"]\ncapabilities = ["pull", "resolve"]\n'
