"""The reference that is kept beside the checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from finetune_trainer.pod.exit_status import PodFailure, SupersededError
from finetune_trainer.train.checkpoint.kept_reference import KeptReference
from finetune_trainer.train.data.feed import Examples
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

REFERENCE = np.array([[-1.5, -2.25], [-3.0, -1243.776]], np.float32)


@pytest.fixture
def split() -> Split:
    return replace(networks.random_split(documents=2, examples=2), digest="d1")


def all_of(split: Split) -> Examples:
    return Examples(split, [[0], [1]])


def test_what_is_kept_is_found_for_the_same_split_and_settings(
    tmp_path: Path, world: World, split: Split
) -> None:
    store = KeptReference(str(tmp_path / "job"), "r1", world)
    assert store.load(all_of(split)) is None
    store.save(replace(split, reference=REFERENCE))
    loaded = KeptReference(str(tmp_path / "job"), "r1", world).load(all_of(split))
    assert loaded is not None
    assert loaded.reference is not None
    np.testing.assert_array_equal(loaded.reference, REFERENCE, strict=True)
    assert store.load(all_of(replace(split, digest="d2"))) is None
    assert KeptReference(str(tmp_path / "job"), "r2", world).load(all_of(split)) is None
    assert [path.name for path in (tmp_path / "job").rglob("*.npy*")] == ["d1.npy"]


def test_that_of_the_job_which_is_carried_on_is_only_read(tmp_path: Path, world: World, split: Split) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    KeptReference(first, "s1", world).save(replace(split, reference=REFERENCE))
    store = KeptReference(second, "s1", world, foreign_folder=first)
    loaded = store.load(all_of(split))
    assert loaded is not None
    np.testing.assert_array_equal(loaded.reference, REFERENCE)
    store.save(replace(split, reference=2 * REFERENCE))
    again = store.load(all_of(split))
    assert again is not None
    np.testing.assert_array_equal(again.reference, 2 * REFERENCE)
    np.testing.assert_array_equal(np.load(next((tmp_path / "first").rglob("d1.npy"))), REFERENCE)


def test_what_a_shorter_run_left_out_is_computed(tmp_path: Path, world: World, split: Split) -> None:
    store = KeptReference(str(tmp_path), "s1", world)
    store.save(replace(split, reference=REFERENCE * [[1], [0]]))
    assert store.load(Examples(split, [[0]])) is not None
    assert store.load(all_of(split)) is None
    # An attempt after the last step needs none.
    assert store.load(Examples(split, [])) is not None
    store.save(replace(split, reference=REFERENCE * [[0], [1]]))
    loaded = store.load(all_of(split))
    assert loaded is not None
    np.testing.assert_array_equal(loaded.reference, REFERENCE)


def test_a_damaged_file_is_said_and_not_used(
    tmp_path: Path, world: World, split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    store = KeptReference(str(tmp_path), "r1", world)
    store.save(replace(split, reference=REFERENCE))
    (file,) = tmp_path.rglob("d1.npy")
    content = file.read_bytes()
    for damaged in (b"", content[:40], content[:-4]):
        file.write_bytes(damaged)
        assert store.load(all_of(split)) is None
        assert capsys.readouterr().out.startswith("cannot read the stored reference; computing it again: ")


def test_a_storage_that_takes_nothing_stops_no_training(
    tmp_path: Path, world: World, split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").write_text("a file where the folder would be")
    KeptReference(str(tmp_path / "job"), "r1", world).save(replace(split, reference=REFERENCE))
    output = capsys.readouterr().out
    assert output.startswith("cannot store the reference; later attempts compute it again: "), output


def test_pods_that_newer_ones_have_replaced_store_nothing(tmp_path: Path, world: World, split: Split) -> None:
    def replaced() -> None:
        raise SupersededError("newer pods claimed the folder")

    store = KeptReference(str(tmp_path), "r1", world, confirm=replaced)
    with pytest.raises(PodFailure) as caught:
        store.save(replace(split, reference=REFERENCE))
    assert (caught.value.exit_code, caught.value.reason) == (75, "Superseded")
    assert [*tmp_path.rglob("*.npy*")] == []
