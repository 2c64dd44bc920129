"""A registry over a folder, for the tests of releases."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock

from cluster import binaries
from support.cache import cache
from support.ports import listens
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# NB: buildah remembers by the address of a registry which layers it has. Under another address it would compress
# gigabytes again to learn that they are there.
_PUSH_HOST, _PUSH_PORT = "127.70.84.1", 5000


def storage() -> Path:
    """The folder of images."""
    return cache() / "registry"


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
    """A registry, not started yet, with its configuration in `directory`; of `storage()` unless `images` names a folder."""
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
