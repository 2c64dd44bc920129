"""What an adapter says of its base."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "README.md": b"read me",
}
# Of [["config.json", sha256 of {}], ["model-1.safetensors", ...], ...] as JSON: adapters of other releases name it.
DIGEST = "sha256:10fddba50ccc038952dcb40da6fa31e8b5707c92a5f58d1c8919d1495d49373b"


def save(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


SAME = {
    "the same files": {},
    "another model card": {"README.md": b"more"},
    "another tokenizer": {"tokenizer.json": b"{}"},
    "the weights in another format too": {"pytorch_model.bin": b"weights"},
}
OTHERS: dict[str, dict[str, bytes]] = {
    "another byte": {"model-2.safetensors": b"twp"},
    "one file more": {"model-3.safetensors": b""},
    "another config": {"config.json": b"{ }"},
    "another order": {"model-1.safetensors": b"two", "model-2.safetensors": b"one"},
}


@pytest.mark.parametrize("case", SAME)
def test_the_digest_of_the_same_weights(case: str, tmp_path: Path) -> None:
    assert base_reference.compute_digest(save(FILES | SAME[case], tmp_path / "model")) == DIGEST


@pytest.mark.parametrize("case", OTHERS)
def test_the_digest_of_other_weights(case: str, tmp_path: Path) -> None:
    assert base_reference.compute_digest(save(FILES | OTHERS[case], tmp_path / "model")) != DIGEST


def test_the_digest_of_weights_that_are_no_safetensors(tmp_path: Path) -> None:
    first, second = (
        save({"pytorch_model.bin": content}, tmp_path / content.decode()) for content in (b"1", b"2")
    )
    assert base_reference.compute_digest(first) != base_reference.compute_digest(second)


def test_what_the_hubs_client_knows_is_not_read(tmp_path: Path) -> None:
    """Its large files are named by their SHA-256: the digest is that of the same files elsewhere."""
    plain = save({"config.json": b"{}", "model.safetensors": b"weights"}, tmp_path / "plain")
    snapshot, blobs = tmp_path / "snapshot", save({}, tmp_path / "blobs")
    known = {
        "config.json": (b"{}", "9e26dfeeb6e641a33dae4961196235bdb965b21b"),
        "model.safetensors": (b"", WEIGHTS),
    }
    snapshot.mkdir()
    for name, (content, blob) in known.items():
        (blobs / blob).write_bytes(content)
        (snapshot / name).symlink_to(blobs / blob)
    assert base_reference.compute_digest(snapshot) == base_reference.compute_digest(plain)


WEIGHTS = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
NOTES = [
    Origin("/models/base", digest=DIGEST),
    Origin("org/base", "0123456789abcdef0123456789abcdef01234567", DIGEST),
    Origin("models:/base/3/model", digest=DIGEST),
]


@pytest.mark.parametrize("base", NOTES, ids=[base.uri for base in NOTES])
def test_a_note_says_what_was_written(base: Origin, tmp_path: Path) -> None:
    assert base_reference.read_reference(tmp_path) is None
    base_reference.write_reference(base, tmp_path)
    assert base_reference.read_reference(tmp_path) == base
