"""buildah's images as they are on the disk: manifests, configurations and the folders of layers.

Read from the files that containers/storage writes, which replaces each of them as a whole.
"""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.paths import ClusterError
from support.cache import cache


@dataclass(frozen=True)
class StoredImage:
    """An image.

    Attributes:
        config_digest: of its configuration; the digest of its manifest differs.
        layers: folders with the files of each layer, the lowest first, as overlayfs has them.
    """

    config_digest: str
    manifest: bytes
    config: bytes
    layers: tuple[Path, ...]

    @property
    def layer_digests(self) -> list[str]:
        """The digests of the layers' archives, uncompressed."""
        digests: list[str] = json.loads(self.config)["rootfs"]["diff_ids"]
        return digests


def folder() -> Path:
    """Where buildah keeps images and layers."""
    return cache() / "buildah" / "root"


def local_name(image: str, tag: str) -> str:
    """What buildah calls an image that was built here."""
    return f"localhost/{image}:{tag}"


def has(image: str, tag: str) -> bool:
    """Whether an image was built here and is complete."""
    try:
        read(image, tag)
    except ClusterError:
        return False
    return True


def read(image: str, tag: str) -> StoredImage:
    """An image that was built here.

    Raises:
        ClusterError: there is none of that name, or not all of it.
    """
    name = local_name(image, tag)
    record = _find(name)
    if record is None:
        raise ClusterError(f"there is no image {name} in {folder()}")
    digest = f"sha256:{record['id']}"
    files = folder() / "overlay-images" / record["id"]
    parents = {layer["id"]: layer.get("parent") for layer in _records("overlay-layers/layers.json")}
    layers: list[Path] = []
    layer = record["layer"]
    while layer in parents:
        layers.insert(0, folder() / "overlay" / layer / "diff")
        layer = parents[layer]
    try:
        config = (files / f"={b64encode(digest.encode()).decode()}").read_bytes()
        stored = StoredImage(digest, (files / "manifest").read_bytes(), config, tuple(layers))
    except FileNotFoundError as error:
        raise ClusterError(
            f"{name} is incomplete: {error.filename} is missing; `make prune` removes all images"
        ) from error
    present = sum(layer.is_dir() for layer in layers)
    if present != len(stored.layer_digests):
        raise ClusterError(
            f"{name} is incomplete: {present} of {len(stored.layer_digests)} layers are in {folder()}; `make prune` removes "
            "all images"
        )
    return stored


def _find(name: str) -> dict[str, Any] | None:
    images = _records("overlay-images/images.json")
    return next((image for image in images if name in image.get("names", [])), None)


def _records(file: str) -> list[dict[str, Any]]:
    try:
        records: list[dict[str, Any]] = json.loads((folder() / file).read_text())
    except FileNotFoundError:
        return []
    return records
