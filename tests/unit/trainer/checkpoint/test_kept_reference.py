"""The reference that is kept beside the checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from finetune_trainer.train.checkpoint.kept_reference import KeptReference
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

REFERENCE = np.array([[-1.5, -2.25], [-3.0, -1243.776]], np.float32)


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as found:
        yield found


@pytest.fixture
def split() -> Split:
    return replace(networks.random_split(documents=2, examples=2), digest="d1")


def test_what_is_kept_is_found_for_the_same_split_and_recipe(
    tmp_path: Path, world: World, split: Split
) -> None:
    kept = KeptReference(str(tmp_path / "job"), "r1", world)
    assert kept.found(split) is None
    kept.keep(replace(split, reference=REFERENCE))
    found = KeptReference(str(tmp_path / "job"), "r1", world).found(split)
    assert found is not None
    assert found.reference is not None
    np.testing.assert_array_equal(found.reference, REFERENCE, strict=True)
    assert kept.found(replace(split, digest="d2")) is None
    assert KeptReference(str(tmp_path / "job"), "r2", world).found(split) is None
    assert [path.name for path in (tmp_path / "job").rglob("*.npy*")] == ["d1.npy"]


def test_a_damaged_file_is_said_and_not_used(
    tmp_path: Path, world: World, split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = KeptReference(str(tmp_path), "r1", world)
    kept.keep(replace(split, reference=REFERENCE))
    (file,) = tmp_path.rglob("d1.npy")
    whole = file.read_bytes()
    for damaged in (b"", whole[:40], whole[:-4]):
        file.write_bytes(damaged)
        assert kept.found(split) is None
        assert capsys.readouterr().out.startswith("the kept reference cannot be read and is computed again: ")


def test_a_storage_that_takes_nothing_stops_no_training(
    tmp_path: Path, world: World, split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").write_text("a file where the folder would be")
    KeptReference(str(tmp_path / "job"), "r1", world).keep(replace(split, reference=REFERENCE))
    said = capsys.readouterr().out
    assert said.startswith("the reference is not kept for later attempts, which compute it again: "), said
