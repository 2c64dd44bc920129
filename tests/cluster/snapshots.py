"""The images for nodes: snapshots of containerd that are links to the layers that buildah keeps.

NB: to push, pull and unpack four gigabytes in a hundred thousand files takes minutes, and the room of three copies.
overlayfs never writes to a layer, so that any number of nodes may mount those that buildah made. A layer's archive is
nowhere: containerd needs it to unpack a layer, or to push it, and to neither here.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
import shutil
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from cluster import image_store
from cluster.packages import SEARCHED
from cluster.paths import ClusterError
from cluster.process import run
from support.cache import cache
from support.process import ASIDE, Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cluster.image_store import StoredImage

# This name has no DNS record: what is not on a node cannot be pulled.
HOST = "registry.finetune.local"
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


def reference(image: str, tag: str) -> str:
    """What a pod calls an image that was built here, in every cluster the same."""
    return f"{HOST}/{image}:{tag}"


def store() -> Path:
    """The folder that nodes begin with: that of a containerd which has all images."""
    return cache() / "snapshots"


def ensure(references: Iterable[str]) -> None:
    """Make the folder for these images and no others, unless it is there."""
    images = {each: _read(each) for each in sorted(references)}
    content = json.dumps({each: [str(layer) for layer in image.layers] for each, image in images.items()})
    with lock():
        record = _record()
        if record.exists() and record.read_text() == content:
            return
        # NB: a removal that is interrupted must not leave a folder that looks complete.
        record.unlink(missing_ok=True)
        shutil.rmtree(store(), ignore_errors=True)
        with (
            tempfile.TemporaryDirectory(prefix="snapshots-") as directory,
            _containerd(Path(directory)) as ctr,
        ):
            add(ctr, images)
        record.write_text(content)


def references() -> list[str]:
    """The images that nodes begin with."""
    record = _record()
    return list(json.loads(record.read_text())) if record.exists() else []


def copy_to_node(root: Path) -> None:
    """Make the folder of a node's containerd, with all images; nothing if there are none."""
    with lock():
        if _record().exists():
            shutil.copytree(store(), root, symlinks=True)


def client(socket: str) -> list[str]:
    """The command that talks to the containerd of a socket, about what kubelets use."""
    return ["ctr", "--address", socket, "--namespace", "k8s.io"]


def add(ctr: Sequence[str], references: Iterable[str]) -> None:
    """Give images to a running containerd, which `ctr` talks to; those that it has are left as they are."""
    present = run(*ctr, "images", "list", "--quiet").split()
    for each in references:
        if each not in present:
            _add(ctr, each, _read(each))


def _read(name: str) -> StoredImage:
    image, _, tag = name.removeprefix(f"{HOST}/").partition(":")
    return image_store.read(image, tag)


def _add(ctr: Sequence[str], name: str, image: StoredImage) -> None:
    top = _add_layers(ctr, image)
    with tempfile.NamedTemporaryFile(prefix="image-", suffix=".tar") as file:
        file.write(build_archive(name, image))
        file.flush()
        run(*ctr, "images", "import", "--no-unpack", file.name)
    # As unpacking does: the image keeps its snapshots.
    run(*ctr, "content", "label", image.config_digest, f"containerd.io/gc.ref.snapshot.overlayfs={top}")


def _add_layers(ctr: Sequence[str], image: StoredImage) -> str:
    """Make a snapshot of each layer that has none, and return the name of the highest."""
    present = {line.split()[0] for line in run(*ctr, "snapshots", "list").splitlines()}
    parent = ""
    for digest, layer in zip(image.layer_digests, image.layers, strict=True):
        name = chain_id(parent, digest)
        if name not in present:
            key = f"link-{secrets.token_hex(8)}"
            run(*ctr, "snapshots", "prepare", key, *([parent] if parent else []))
            folder = snapshot_folder(run(*ctr, "snapshots", "mounts", "/", key))
            folder.rmdir()
            folder.symlink_to(layer)
            run(*ctr, "snapshots", "commit", name, key)
        parent = name
    return parent


def chain_id(parent: str, digest: str) -> str:
    """The name of a layer's snapshot on that of its parent: the chain ID of the OCI image specification."""
    return f"sha256:{hashlib.sha256(f'{parent} {digest}'.encode()).hexdigest()}" if parent else digest


def snapshot_folder(mount: str) -> Path:
    """The folder that is written to, of a snapshot's mount command."""
    match = re.search(r"upperdir=([^,\s]+)", mount) or re.search(r"-t bind (\S+)", mount)
    if match is None:
        raise ClusterError(f"containerd mounts a snapshot in an unknown way: {mount}")
    return Path(match[1])


def build_archive(name: str, image: StoredImage) -> bytes:
    """An OCI archive of an image's manifest and configuration, without its layers."""
    manifest_digest = f"sha256:{hashlib.sha256(image.manifest).hexdigest()}"
    manifest = {
        "mediaType": json.loads(image.manifest)["mediaType"],
        "digest": manifest_digest,
        "size": len(image.manifest),
        "annotations": {"io.containerd.image.name": name},
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode(),
        f"blobs/{manifest_digest.replace(':', '/')}": image.manifest,
        f"blobs/{image.config_digest.replace(':', '/')}": image.config,
    }
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


@contextmanager
def _containerd(directory: Path) -> Iterator[list[str]]:
    """A context with a containerd over the store that runs no container; yields the command that talks to it."""
    socket = directory / "containerd.sock"
    file = directory / "containerd.toml"
    file.write_text(CONTAINERD.format(root=store(), state=directory / "state", socket=socket))
    # NB: it leaves its folders mounted. In its own mount namespace these mounts end with it.
    command = [*ASIDE, "containerd", "--config", str(file)]
    process = Process("containerd", command, directory / "containerd.log", {"PATH": SEARCHED})
    ctr = client(str(socket))
    process.start()
    try:
        wait_for("containerd", lambda: "Server:" in run(*ctr, "version", check=False), 30, process)
        yield ctr
    finally:
        process.stop()


def _record() -> Path:
    """The file with the images of the store and their layers, which is there once the store is complete."""
    return store() / "images.json"


def lock() -> FileLock:
    """The lock for the store, within a process and between processes."""
    cache().mkdir(parents=True, exist_ok=True)
    return FileLock(cache() / "snapshots.lock")
