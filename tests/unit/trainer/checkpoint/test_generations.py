"""Two generations of pods of one job that write one checkpoint folder: those of a lost node, and those that replace them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from finetune_crds.contract import ENV_ATTEMPT
from finetune_trainer.pod.exit_status import SupersededError
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
from finetune_trainer.train.checkpoint.claim import MANIFEST, Claim
from finetune_trainer.train.checkpoint.folder import CheckpointFolder
from support.checkpoints import Run, same, save_of
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from finetune_trainer.train.runtime.distributed import World


# A new attempt, or the pods of the same Job after Kueue has admitted it again.
@pytest.fixture(params=[2, 1], ids=["the next attempt", "the same attempt"])
def start_newer(
    request: pytest.FixtureRequest, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Run]:
    """Starts the newer pods, which claim the folder and resume."""

    def start() -> Run:
        monkeypatch.setenv(ENV_ATTEMPT, str(request.param))
        newer = Run(tmp_path, world, {"keep": 2})
        newer.resume()
        return newer

    return start


@pytest.fixture
def older(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The pods of the first attempt, which have published step 1."""
    monkeypatch.setenv(ENV_ATTEMPT, "1")
    run = Run(tmp_path, world, {"keep": 2})
    run.train_and_save(1)
    return run


@pytest.fixture
def untouched(tmp_path_factory: pytest.TempPathFactory, world: World) -> list[dict[str, torch.Tensor]]:
    """The states after each step of a run that nobody interrupts."""
    run = Run(tmp_path_factory.mktemp("untouched"), world)
    states = [run.state()]
    for _ in range(4):
        run.train()
        states.append(run.state())
    return states


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def publications(run: Run) -> list[int]:
    return CheckpointFolder(run.checkpointer.folder).list_complete_steps()


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: Callable[[], object]
) -> None:
    """Call once, right after the next call of a method."""
    method = getattr(owner, name)

    def interrupted(*args: object, **options: object) -> object:
        monkeypatch.setattr(owner, name, method)
        result = method(*args, **options)
        call()
        return result

    monkeypatch.setattr(owner, name, interrupted)


def test_pods_that_are_replaced_write_no_shards(
    older: Run, start_newer: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_newer()
    before = contents(older.steps)
    older.train()

    def write(*_: object) -> None:
        raise AssertionError("shards are written")

    monkeypatch.setattr(Checkpointer, "_write_shards", write)
    with pytest.raises(SupersededError, match="claimed the checkpoint folder"):
        older.save()
    assert contents(older.steps) == before
    assert (older.published, older.failed) == ([1], [])


def test_pods_that_are_replaced_while_they_write_shards_publish_nothing(
    older: Run, start_newer: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer: list[Run] = []
    interrupt_after(monkeypatch, Checkpointer, "_write_shards", lambda: newer.append(start_newer()))
    older.train()
    with pytest.raises(SupersededError):
        older.save()
    assert (older.published, publications(older)) == ([1], [1])
    # Their shards are gone.
    assert [path.name for path in sorted(older.steps.iterdir())] == [MANIFEST, "step-00000001"]
    assert newer[0].progress.step == 1


def test_a_save_in_the_background_is_not_published_either(
    older: Run, start_newer: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_replaced = threading.Event()
    interrupt_after(monkeypatch, Checkpointer, "_write_shards", lambda: is_replaced.wait(60))
    older.train()
    older.save(wait=False)
    start_newer()
    is_replaced.set()
    wait_for("the save in flight ends", lambda: older.checkpointer.has_failed, 60)
    older.train()
    with pytest.raises(SupersededError):
        older.save(wait=False)
    assert not older.checkpointer.has_failed
    assert publications(older) == [1]


def test_pods_that_are_replaced_delete_no_old_checkpoint(
    older: Run, start_newer: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    older.train_and_save(1)
    newer: list[Run] = []
    interrupt_after(monkeypatch, CheckpointFolder, "publish", lambda: newer.append(start_newer()))
    older.train()
    with pytest.raises(SupersededError):
        older.save()
    # The newer pods have resumed from step 3; without them, step 1 would be deleted.
    assert (newer[0].progress.step, older.published, publications(older)) == (3, [1, 2, 3], [1, 2, 3])


def test_both_write_the_same_step_and_that_of_the_newer_pods_counts(
    older: Run,
    start_newer: Callable[[], Run],
    untouched: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer: list[Run] = []

    def replace_and_write() -> None:
        newer.append(start_newer())
        newer[0].train_and_save(1)

    interrupt_after(monkeypatch, Checkpointer, "_write_shards", replace_and_write)
    older.train()
    with pytest.raises(SupersededError):
        older.save()
    assert save_of(older.steps, 2).name == newer[0].checkpointer.claim.token
    newer[0].train_and_save(2)
    assert publications(older) == [3, 4]
    assert same(newer[0].state(), untouched[4])
    assert same(restart(newer[0]), untouched[4])


def restart(run: Run) -> dict[str, torch.Tensor]:
    """The state that another start of the pods resumes with."""
    again = Run(run.folder, run.world)
    again.resume()
    return again.state()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_marker_that_is_written_too_late_harms_nothing(
    older: Run,
    start_newer: Callable[[], Run],
    untouched: list[dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    """The pods are paused between the last look at the manifest and the marker, as on a node that freezes.

    The newer pods delete the shards of step 2 when they write that step; on a volume, the marker then has no folder.
    """
    newer: list[Run] = []

    def replace_and_write() -> None:
        newer.append(start_newer())
        newer[0].train_and_save(steps)

    def pause() -> None:
        interrupt_after(monkeypatch, Claim, "confirm", replace_and_write)

    older.train()
    interrupt_after(monkeypatch, Checkpointer, "_write_shards", pause)
    with pytest.raises(SupersededError):
        older.save()
    assert (older.published, publications(older)) == ([1, 2][: 2 - steps], [1, 2])
    assert same(restart(newer[0]), untouched[2])
