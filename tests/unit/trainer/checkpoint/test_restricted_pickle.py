"""Checkpoints are read without running what their files say."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from finetune_trainer.train.checkpoint.restricted_pickle import (
    UnsafeFileError,
    load_metadata,
    name_unsafe_file,
)
from finetune_trainer.train.runtime.distributed import World
from support.checkpoints import Run, same, save_of
from support.forged_checkpoints import FORGERIES, METADATA, forge_path
from support.pod_failures import refusal

Forge = Callable[[AbstractFileSystem, str, Path], None]


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    """A run with a checkpoint of step 1."""
    run = Run(tmp_path / "checkpoints", world)
    run.train_and_save(1)
    return run


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
    "name", ["os system", "builtins eval", "builtins setattr", "torch load", "torch.serialization load"]
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


ATTRIBUTES = [
    ("torch.serialization _get_layout", "__module__", torch.serialization._get_layout),
    ("torch.serialization _get_layout", "__defaults__", torch.serialization._get_layout),
    ("torch.distributed.checkpoint.metadata Metadata", "forged", Metadata),
    ("torch.distributed.checkpoint.metadata Metadata", "__qualname__", Metadata),
    ("torch.distributed.checkpoint.metadata Metadata", "__name__", Metadata),
    ("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING", "__name__", _MEM_FORMAT_ENCODING),
]


@pytest.mark.parametrize(("name", "attribute", "target"), ATTRIBUTES)
def test_a_file_changes_nothing_that_outlives_it(run: Run, name: str, attribute: str, target: object) -> None:
    """The opcode BUILD sets attributes of what is on the stack; the next save would import the module that the forger named."""
    before = getattr(target, attribute, None)
    forged = f"c{name.replace(' ', chr(10))}\n".encode() + b"(N}" + build_text(attribute) + build_text("evil")
    message = read_forged(run, forged + b"\x85" * (attribute == "__defaults__") + b"stb0")
    assert message.startswith(f"its file {METADATA} changes ")
    assert getattr(target, attribute, None) == before


def test_a_member_of_an_enum_stays_as_it_is(run: Run) -> None:
    name = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R"
    message = read_forged(run, name + b"}" + build_text("_value_") + build_text("evil") + b"sb0")
    assert message == f"its file {METADATA} changes a _MEM_FORMAT_ENCODING"
    assert _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


@pytest.mark.parametrize("method", ["__setstate__", "__class__", "__reduce__", "forged"])
def test_an_instance_gets_no_other_attributes_than_its_fields(run: Run, method: str) -> None:
    created = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
    message = read_forged(run, created + b"}" + build_text(method) + b"Nsb0")
    assert message == f"its file {METADATA} has other fields than those of Metadata"


NESTED = b")" + b"q\0h\0\x86" * 60
"""A tuple of twice the same tuple, 60 times: without the check, its hash takes years."""


@pytest.mark.parametrize(
    "forged",
    [
        b"}" + NESTED + b"Ns0",
        b"}(" + NESTED + b"Nu0",
        b"(" + NESTED + b"Nd0",
        b"\x8f(" + NESTED + b"\x900",
        b"(" + NESTED + b"\x910",
        b"ctorch.serialization\n_get_layout\n" + NESTED + b"\x85R0",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n" + NESTED + b"\x85R0",
        b"ctorch\nSize\n" + NESTED + b"\x85R0",
        b"}ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}\x8c\x03fqn" + NESTED + b"sbNs0",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + NESTED + b"\x85R0",
    ],
)
def test_no_nested_tuple_is_hashed(run: Run, forged: bytes) -> None:
    assert read_forged(run, forged).startswith(f"its file {METADATA} ")


def test_the_path_of_an_entry_is_a_text(run: Run) -> None:
    metadata = pickle.loads((save_of(run.steps, 1) / METADATA).read_bytes())  # noqa: S301 - the test wrote it
    nested: tuple[object, ...] = ()
    for _ in range(60):
        nested = (nested, nested)
    next(iter(metadata.storage_data.values())).relative_path = nested
    with pytest.raises(pickle.UnpicklingError, match="has an entry without a file"):
        load_metadata(io.BytesIO(pickle.dumps(metadata)))


@pytest.mark.parametrize("length", [0, 1, 200, -1])
def test_a_file_that_ends_early_is_damage(run: Run, length: int) -> None:
    path = save_of(run.steps, 1) / METADATA
    content = path.read_bytes()[:length]
    with pytest.raises(pickle.UnpicklingError, match=r"is damaged|before end of frame"):
        load_metadata(io.BytesIO(content))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_each_protocol_is_read_as_pickle_reads_it(run: Run, protocol: int) -> None:
    metadata = pickle.loads((save_of(run.steps, 1) / METADATA).read_bytes())  # noqa: S301 - the test wrote it
    assert load_metadata(io.BytesIO(pickle.dumps(metadata, protocol))) == metadata


def read_forged(run: Run, forged: bytes) -> str:
    """Put instructions in front of the metadata, which leave nothing on the stack, and return the refusal."""
    metadata = pickle.loads((save_of(run.steps, 1) / METADATA).read_bytes())  # noqa: S301 - the test wrote it
    content = b"\x80\x04" + forged + pickle.dumps(metadata, 2)
    with pytest.raises((UnsafeFileError, pickle.UnpicklingError)) as caught, name_unsafe_file(METADATA):
        load_metadata(io.BytesIO(content))
    return str(caught.value)


def build_text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def test_an_unforged_checkpoint_loads_as_it_was(run: Run) -> None:
    again = Run(run.folder, run.world)
    assert again.resume().step == 1
    assert same(again.state(), run.state())


class EarlierPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does, which is that of Debian 12."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_checkpoints_of_an_earlier_python_are_read(run: Run) -> None:
    path = save_of(run.steps, 1) / METADATA
    written = io.BytesIO()
    metadata = load_metadata(io.BytesIO(path.read_bytes()))
    EarlierPickler(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    assert load_metadata(io.BytesIO(written.getvalue())) == metadata


@pytest.mark.parametrize(
    "forged",
    [(torch.dtype, "__class__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")],
    ids=str,
)
def test_getattr_finds_memory_formats_alone(forged: tuple[Any, str]) -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return getattr, forged

    with pytest.raises(pickle.UnpicklingError, match=r"refers to (builtins.getattr|torch.dtype)"):
        load_metadata(io.BytesIO(pickle.dumps(Forged())))
