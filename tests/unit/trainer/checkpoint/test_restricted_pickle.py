"""Checkpoints are read without running what their files say."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.metadata import Metadata

from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.checkpoints import Run, same, save_of
from support.forged_checkpoints import FORGERIES, METADATA, forge_path

Forge = Callable[[AbstractFileSystem, str, Path], None]


@pytest.fixture
def world() -> Iterator[World]:
    """A gang of one, in this process."""
    with networks.alone() as lone_world:
        yield lone_world


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    """A run with a checkpoint of step 1."""
    run = Run(tmp_path / "checkpoints", world)
    run.train_and_save(1)
    return run


def refusal(call: Callable[[], object]) -> tuple[int, str, str]:
    with pytest.raises(PodFailure) as caught:
        call()
    return caught.value.exit_code, caught.value.reason, caught.value.message


@pytest.mark.parametrize(("forge", "sentence"), FORGERIES)
def test_a_forged_file_runs_no_code(run: Run, tmp_path: Path, forge: Forge, sentence: str) -> None:
    forge(LocalFileSystem(), str(save_of(run.steps, 1)), tmp_path / "proof")
    code, reason, message = refusal(Run(run.folder, run.world).resume)
    assert not (tmp_path / "proof").exists()
    assert (code, reason) == (64, "CheckpointUnsafe")
    assert message == (
        f"the checkpoint {run.steps}/step-00000001 is unsafe ({sentence}, which the trainer never writes; nothing of it was run): find out "
        "who can write to this folder, and delete this folder to resume from an older checkpoint, or from the start if no older one exists"
    )


@pytest.mark.parametrize(("forge", "sentence"), FORGERIES)
def test_a_forged_checkpoint_of_another_job_runs_no_code(
    run: Run, tmp_path: Path, forge: Forge, sentence: str
) -> None:
    forge(LocalFileSystem(), str(save_of(run.steps, 1)), tmp_path / "proof")
    code, reason, message = refusal(run.next_job(run.steps).resume)
    assert not (tmp_path / "proof").exists()
    assert (code, reason) == (64, "CheckpointUnsafe")
    assert sentence in message
    assert message.endswith(
        "find out who can write to this folder, and set checkpoint.resumeFrom to another checkpoint"
    )


@pytest.mark.parametrize("path", ["../secret.pt", "/etc/hostname", "a/../../secret.pt", "..\\secret.pt", ""])
def test_a_checkpoint_reads_no_file_outside_of_its_folder(run: Run, path: str) -> None:
    save = save_of(run.steps, 1)
    torch.save(torch.zeros(8), save.parent / "secret.pt")
    forge_path(LocalFileSystem(), str(save), path)
    code, reason, message = refusal(Run(run.folder, run.world).resume)
    assert (code, reason) == (64, "CheckpointUnsafe")
    assert f"its file {METADATA} names {path!r}" in message


@pytest.mark.parametrize(
    "name", ["os system", "builtins eval", "builtins getattr", "torch load", "torch.serialization load"]
)
def test_only_the_classes_of_metadata_are_found(run: Run, name: str) -> None:
    module, attribute = name.split()
    content = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    (save_of(run.steps, 1) / METADATA).write_bytes(content.ljust(metadata_size(run), b"\0"))
    _, reason, message = refusal(Run(run.folder, run.world).resume)
    assert reason == "CheckpointUnsafe"
    assert f"refers to {module}.{attribute}, which" in message


def metadata_size(run: Run) -> int:
    return (save_of(run.steps, 1) / METADATA).stat().st_size


def test_a_pickle_of_something_else_is_damage(run: Run) -> None:
    content = pickle.dumps({"a": 1})
    (save_of(run.steps, 1) / METADATA).write_bytes(content.ljust(metadata_size(run), b"\0"))
    _, reason, message = refusal(Run(run.folder, run.world).resume)
    assert reason == "CheckpointDamaged"
    assert "(its file .metadata has no metadata)" in message


def test_the_attributes_of_a_class_stay_as_they_are(run: Run) -> None:
    """The opcode BUILD sets attributes of what is on the stack, which may be a class."""
    content = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vforged\nI1\nstb."
    (save_of(run.steps, 1) / METADATA).write_bytes(content.ljust(metadata_size(run), b"\0"))
    _, reason, _ = refusal(Run(run.folder, run.world).resume)
    assert reason in ("CheckpointUnsafe", "CheckpointDamaged")
    assert not hasattr(Metadata, "forged")


def test_an_unforged_checkpoint_loads_as_it_was(run: Run) -> None:
    again = Run(run.folder, run.world)
    assert again.resume().step == 1
    assert same(again.state(), run.state())
