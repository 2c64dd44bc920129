"""Checkpoints on storages that fill up, get damaged and go away, with real ranks and real files."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.exceptions
import pytest
import torch
from torch import nn

from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint.folder import MARKER, CheckpointFolder, Save
from finetune_trainer.train.model.optimizer.compact_adamw import CompactAdamW
from finetune_trainer.train.runtime.distributed import World
from support.checkpoints import RATE, Run, compact, same, save_of
from support.pod_failures import refusal


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    return Run(tmp_path, world)


def folders(run: Run) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.steps.glob("step-*"))


def test_a_checkpoint_written_during_training_holds_the_step_it_was_taken_at(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 11: what is written is a copy. The writer is held back until the tensors it was given have changed."""
    trained_on = threading.Event()
    list_saves = CheckpointFolder.list_saves

    def held_back(folder: CheckpointFolder, only: int | None = None) -> list[Save]:
        assert trained_on.wait(60)
        return list_saves(folder, only)

    monkeypatch.setattr(CheckpointFolder, "list_saves", held_back)
    for _ in range(2):  # the second copy goes where the first one was
        trained_on.clear()
        run.train()
        state_at_save = run.state()
        run.save(wait=False)
        for _ in range(3):
            run.train()
        assert not same(state_at_save, run.state())
        trained_on.set()
        run.checkpointer.drain()
        # NB: another attempt of the same job would take the folder over.
        reader = run.next_job(run.steps)
        reader.resume()
        assert same(reader.state(), state_at_save)
    assert run.published == [1, 5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_training_goes_on_while_the_disk_is_full(
    small_disk: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(small_disk, world)
    run.train_and_save(1)
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**20))
    run.train()
    run.save(wait=False)
    run.train()
    run.save()
    sentences = [
        f"the checkpoint of step {step} could not be written (rank 0: No space left on device): the newest "
        "checkpoint is at step 1; training continues and tries again at the next checkpoint"
        for step in (2, 3)
    ]
    assert run.failed == list(zip((2, 3), sentences, strict=True))
    assert capsys.readouterr().out.splitlines() == sentences
    assert (run.checkpointer.failure, run.checkpointer.published, folders(run)) == (sentences[1], 1, [1])
    ballast.unlink()
    run.save()  # the same step again, as on SIGTERM
    assert (run.checkpointer.failure, run.checkpointer.published, run.published) == (None, 3, [1, 3])
    again = Run(small_disk, world)
    assert again.resume().step == 3
    assert same(again.state(), run.state())


@pytest.mark.parametrize("part", ["list_saves", "publish"])
def test_a_storage_may_fail_before_and_after_the_shards_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    run.train_and_save(1)
    error = botocore.exceptions.EndpointConnectionError(endpoint_url="http://storage")
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise error

        patch.setattr(CheckpointFolder, part, fails)
        run.train_and_save(1)
    failure = run.checkpointer.failure
    assert failure == (
        'the checkpoint of step 2 could not be written (rank 0: Could not connect to the endpoint URL: "http://storage")'
        ": the newest checkpoint is at step 1; training continues and tries again at the next checkpoint"
    )
    assert run.next_job(run.steps).resume().step == 1
    run.train_and_save(1)
    assert (run.checkpointer.failure, run.published, folders(run)) == (None, [1, 3], [1, 3])


def test_old_checkpoints_that_cannot_be_deleted_do_no_harm(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = CheckpointFolder.remove

    def refused(folder: CheckpointFolder, saves: list[Save]) -> None:
        if any(save.step == 1 for save in saves):
            raise PermissionError(13, "Permission denied")
        remove(folder, saves)

    run.train_and_save(2)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "remove", refused)
        run.train_and_save(1)
    assert (run.checkpointer.failure, run.published, folders(run)) == (None, [1, 2, 3], [1, 2, 3])
    assert capsys.readouterr().out == (
        f"old checkpoints in {run.steps} could not be deleted; the next save will try again: Permission denied\n"
    )
    run.train_and_save(1)
    assert folders(run) == [3, 4]


@pytest.mark.parametrize("wait", [True, False])
def test_errors_of_ours_are_not_taken_for_the_storages(
    run: Run, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(CheckpointFolder, "publish", broken)
    run.train()

    def save() -> None:
        run.save(wait=wait)
        run.checkpointer.drain()

    with pytest.raises(KeyError, match="a bug"):
        save()


def test_the_best_checkpoint_is_kept_beside_the_newest_ones(run: Run) -> None:
    run.train_and_save(3, best=2)
    best = {name: value for name, value in run.state().items() if " " not in name}
    assert (run.checkpointer.best_step, folders(run)) == (2, [2, 3])
    run.save(best=True)  # step 3 is written already
    assert (run.checkpointer.best_step, run.published) == (3, [1, 2, 3, 3])
    run.train_and_save(4)
    assert folders(run) == [3, 6, 7]
    again = Run(run.folder, run.world)
    assert (again.resume().best_step, again.checkpointer.best_step) == (3, 3)
    moments = {name: value for name, value in again.state().items() if " " in name}
    again.checkpointer.load_weights(3, again.model)
    assert same(again.state(), best | moments)
    again.train_and_save(1, best=8)
    assert folders(again) == [7, 8]


def test_what_a_dead_attempt_left_is_no_part_of_a_checkpoint(run: Run) -> None:
    for place in ("step-00000001/attempt-1-00000000", "step-00000001", "step-00000002"):
        (run.steps / place).mkdir(parents=True, exist_ok=True)
        for name in (".metadata", "__3_0.distcp"):
            (run.steps / place / name).write_text("{}")
    run.train_and_save(1)
    save = save_of(run.steps, 1)
    assert [*save.parent.iterdir()] == [save]
    assert sorted(path.name for path in save.iterdir()) == [".metadata", MARKER, "__0_0.distcp"]
    sizes = {path.name: path.stat().st_size for path in save.iterdir() if path.name != MARKER}
    assert json.loads((save / MARKER).read_text())["files"] == sizes
    assert run.next_job(run.steps).resume().step == 1
    run.train_and_save(1)
    assert [*save_of(run.steps, 2).parent.iterdir()] == [save_of(run.steps, 2)]


def cut(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])


def garble(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / ".metadata").unlink(), "its file .metadata is missing"),
    (cut, "its file __0_0.distcp has 1,000 bytes instead of "),
    (lambda folder: (folder / MARKER).write_text(""), "its file COMPLETE cannot be read"),
    (lambda folder: (folder / MARKER).write_text('{"files": {}}'), "its file COMPLETE cannot be read"),
    (
        lambda folder: (folder / MARKER).write_text('{"files": {}, "progress": 1}'),
        "its file COMPLETE cannot be read",
    ),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_never_in_silence(
    run: Run, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], sentence: str
) -> None:
    run.train_and_save(2)
    damage(save_of(run.steps, 2))
    again = Run(run.folder, run.world)
    assert again.resume().step == 1
    output = capsys.readouterr().out
    assert output.startswith(f"the checkpoint {run.steps}/step-00000002 is damaged ({sentence}")
    assert output.endswith("): using the older checkpoint of step 1\n")
    (save_of(run.steps, 1) / ".metadata").unlink()
    code, reason, message = refusal(again.checkpointer.find_newest)
    assert (code, reason) == (64, "CheckpointDamaged")
    assert f"is damaged ({sentence}" in message
    assert message.endswith(
        f"there is no older checkpoint: restore its files, or delete the folder {run.steps} to start over"
    )
    assert folders(run) == [1, 2]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_the_right_size_that_cannot_be_read_is_damage_too(run: Run, name: str) -> None:
    run.train_and_save(1)
    garble(save_of(run.steps, 1), name)
    code, reason, message = refusal(Run(run.folder, run.world).resume)
    assert (code, reason) == (64, "CheckpointDamaged")
    assert message.startswith(f"the checkpoint {run.steps}/step-00000001 is damaged (")
    assert message.endswith(
        "): delete this folder to resume from an older checkpoint, or from the start if no older one exists"
    )


def test_a_checkpoint_of_another_model_is_refused(run: Run) -> None:
    run.train_and_save(1)
    assert refusal(Run(run.folder, run.world, width=2 * run.width).resume) == (
        64,
        "ForeignCheckpoint",
        f"the checkpoint {run.steps}/step-00000001 was written for another model than the current model.base /models/tiny "
        "(0.bias is 32 in the checkpoint and 64 in the model): restore that model, or delete the folder "
        f"{run.steps} to start over",
    )


def test_moments_of_another_type_are_refused(tmp_path: Path, world: World) -> None:
    """They are codes: as numbers they would be wrong by orders of magnitude."""

    def in_fp32(model: nn.Module) -> list[torch.optim.Optimizer]:
        weights = list(model.parameters())
        return [
            CompactAdamW(
                [{"params": weights}],
                lr=RATE,
                betas=(0.9, 0.999),
                eps=1e-8,
                eight_bit=True,
                embeddings=weights,
                seed=7,
            )
        ]

    run = Run(tmp_path, world, width=1024, optimizers_of=compact)
    run.train_and_save(1)
    assert refusal(Run(tmp_path, world, width=1024, optimizers_of=in_fp32).resume) == (
        64,
        "ForeignCheckpoint",
        f"the checkpoint {run.steps}/step-00000001 was written by another release, whose optimizer stored exp_avg of 1.weight as "
        f"torch.uint8 instead of torch.float32: finish the job with that release, or delete the folder {run.steps} to start over",
    )


def test_a_storage_that_is_away_at_the_start_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> list[int]:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(CheckpointFolder, "list_complete_steps", away)
    assert refusal(run.checkpointer.find_newest) == (
        1,
        "CheckpointUnreadable",
        f"the checkpoints in {run.steps} cannot be read: Connection refused",
    )


def chained(error: Exception, cause: Exception) -> Exception:
    error.__context__ = cause
    return error


SAYINGS: list[tuple[Exception, str | None]] = [
    (OSError(28, "No space left on device"), "No space left on device"),
    (TimeoutError("took too long\nat line 3"), "took too long"),
    (botocore.exceptions.NoCredentialsError(), "Unable to locate credentials"),
    (chained(RuntimeError("unexpected pos 64 vs 0"), OSError(27, "File too large")), "File too large"),
    (RuntimeError("unexpected pos 64 vs 0"), None),
    (KeyError("a bug"), None),
]


@pytest.mark.parametrize(("error", "reason"), SAYINGS)
def test_what_a_storage_says(error: Exception, reason: str | None) -> None:
    assert filesystems.describe_failure(error) == reason
