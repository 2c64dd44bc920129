"""The images for nodes: what containerd is given of buildah's."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from base64 import b64encode
from pathlib import Path

import pytest

from cluster import image_store, snapshots
from cluster.paths import ClusterError

MANIFEST = json.dumps({"mediaType": "application/vnd.oci.image.manifest.v1+json"}).encode()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))


def keep_image(name: str, digests: list[str]) -> bytes:
    """Write what containers/storage writes of an image of two layers; return its configuration."""
    folder = image_store.folder()
    config = json.dumps({"rootfs": {"diff_ids": digests}}).encode()
    files = folder / "overlay-images" / "1f"
    files.mkdir(parents=True)
    (files / "manifest").write_bytes(MANIFEST)
    (files / f"={b64encode(b'sha256:1f').decode()}").write_bytes(config)
    record = [{"id": "0e"}, {"id": "1f", "names": [name], "layer": "b"}]
    (folder / "overlay-images" / "images.json").write_text(json.dumps(record))
    (folder / "overlay-layers").mkdir()
    for layer in "ab":
        (folder / "overlay" / layer / "diff").mkdir(parents=True)
    layers = [{"id": "a"}, {"id": "other"}, {"id": "b", "parent": "a"}]
    (folder / "overlay-layers" / "layers.json").write_text(json.dumps(layers))
    return config


def test_an_image_is_read_with_its_layers_from_the_lowest() -> None:
    assert not image_store.has("prep", "1")
    config = keep_image("localhost/prep:1", ["sha256:1", "sha256:2"])
    assert image_store.has("prep", "1")
    folders = tuple(image_store.folder() / "overlay" / layer / "diff" for layer in "ab")
    assert image_store.read("prep", "1") == image_store.StoredImage("sha256:1f", MANIFEST, config, folders)
    with pytest.raises(ClusterError, match="there is no image localhost/prep:2"):
        image_store.read("prep", "2")


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [("overlay/b/diff", r"incomplete: 1 of 2 layers"), ("overlay-images/1f/manifest", "manifest is missing")],
)
def test_an_image_that_was_removed_in_part_is_built_again(missing: str, sentence: str) -> None:
    keep_image("localhost/prep:1", ["sha256:1", "sha256:2"])
    path = image_store.folder() / missing
    path.rmdir() if path.is_dir() else path.unlink()
    assert not image_store.has("prep", "1")
    with pytest.raises(ClusterError, match=sentence):
        image_store.read("prep", "1")


def test_snapshots_have_the_names_that_unpacking_gives_them() -> None:
    assert snapshots.chain_id("", "sha256:1") == "sha256:1"
    second = hashlib.sha256(b"sha256:1 sha256:2").hexdigest()
    assert snapshots.chain_id("sha256:1", "sha256:2") == f"sha256:{second}"


@pytest.mark.parametrize(
    "mount",
    [
        "mount -t bind /c/snapshots/2/fs / -o rw,rbind",
        "mount -t overlay overlay / -o index=off,workdir=/c/snapshots/2/work,upperdir=/c/snapshots/2/fs,lowerdir=/c/1/fs",
    ],
)
def test_the_folder_of_a_snapshot_is_the_one_that_is_written_to(mount: str) -> None:
    assert snapshots.snapshot_folder(mount) == Path("/c/snapshots/2/fs")


def test_an_archive_has_manifest_and_configuration() -> None:
    config = keep_image("localhost/prep:1", ["sha256:1", "sha256:2"])
    name = snapshots.reference("prep", "1")
    content = snapshots.build_archive(name, image_store.read("prep", "1"))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        files = {entry.name: (tar.extractfile(entry) or io.BytesIO()).read() for entry in tar}
    digest = hashlib.sha256(MANIFEST).hexdigest()
    index = json.loads(files.pop("index.json"))
    assert [(each["digest"], each["size"], each["annotations"]) for each in index["manifests"]] == [
        (f"sha256:{digest}", len(MANIFEST), {"io.containerd.image.name": name})
    ]
    assert files == {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        f"blobs/sha256/{digest}": MANIFEST,
        "blobs/sha256/1f": config,
    }


def test_a_node_begins_with_links_to_layers_and_a_database_of_its_own(tmp_path: Path) -> None:
    layer, node = tmp_path / "layer", tmp_path / "nodes" / "one"
    layer.mkdir()
    snapshots.copy_to_node(node)
    assert not node.exists()
    (snapshots.store() / "snapshots" / "1").mkdir(parents=True)
    (snapshots.store() / "snapshots" / "1" / "fs").symlink_to(layer)
    (snapshots.store() / "meta.db").write_text("old")
    # It is complete once it has the record of its images.
    snapshots.copy_to_node(node)
    assert not node.exists()
    (snapshots.store() / "images.json").write_text("{}")
    snapshots.copy_to_node(node)
    (node / "meta.db").write_text("new")
    assert (snapshots.store() / "meta.db").read_text() == "old"
    assert (node / "snapshots" / "1" / "fs").readlink() == layer
