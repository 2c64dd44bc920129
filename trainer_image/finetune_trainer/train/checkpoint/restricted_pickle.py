"""Reads the pickles of a checkpoint without running what they say: only the classes that DCP writes are created.

NB: DCP itself reads `.metadata` with `pickle.load`, and entries that are no tensors with `torch.load(weights_only=False)`. Both
run any code that a file names, with the credentials of the pod.
"""

from __future__ import annotations

import pickle
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.serialization
from torch.distributed.checkpoint import DefaultLoadPlanner, filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import set_element

from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator
    from typing import IO

    from torch.distributed.checkpoint import ReadItem

# All that `.metadata` refers to, besides the data types of torch.
_ALLOWED: dict[tuple[str, str], Any] = {
    (value.__module__, value.__qualname__): value
    for value in (
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 - a field of TensorProperties
        filesystem._StorageInfo,  # noqa: SLF001 - where an entry is
        torch.Size,
        torch.serialization._get_layout,  # noqa: SLF001 - how torch pickles torch.strided
    )
}
# How torch names what its own restricted reader refuses, in a message of many lines that suggests to read the file without restriction.
_REFUSED_BY_TORCH = re.compile(r"GLOBAL ([\w.]+) w")
_MAX_NAME_CHARS = 100


class UnsafeFileError(Exception):
    """A file of a checkpoint has something that the trainer never writes; the message has the file and the reason."""


class _ForbiddenError(pickle.UnpicklingError):
    """A pickle refers to something that no checkpoint has."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DCP's metadata, or a data type of torch.

        Raises:
            _ForbiddenError: for anything else.
        """
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        # NB: a plain attribute of the module: getattr with a dotted name would not find one.
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise _ForbiddenError(f"refers to {f'{module}.{name}'[:_MAX_NAME_CHARS]}")


class RestrictedLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads entries that are no tensors as `torch.load(weights_only=True)` does: numbers, texts, lists, dicts, tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set an entry of the nested state to a stored value."""
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            torch.load(value, weights_only=True),
        )


def load_metadata(file: IO[bytes]) -> dcp_metadata.Metadata:
    """Read the metadata of a checkpoint.

    Raises:
        pickle.UnpicklingError: the file is damaged, or refers to anything but classes of the metadata.
        UnsafePathError: an entry is in a file outside of the folder of the checkpoint.
    """
    with _keep_attributes():
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, dcp_metadata.Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("has no metadata")
    for path in {info.relative_path for info in metadata.storage_data.values()}:
        check_relative_path(path)
    return metadata


@contextmanager
def name_unsafe_file(name: str) -> Iterator[None]:
    """Name the file in the errors of the readers of this module and of torch.

    Raises:
        UnsafeFileError: the file refers to something that the trainer never writes.
        pickle.UnpicklingError: the file is damaged.
    """
    try:
        yield
    except UnsafePathError as error:
        raise UnsafeFileError(f"its file {name} names {error}") from error
    except _ForbiddenError as error:
        raise UnsafeFileError(f"its file {name} {error}") from error
    except pickle.UnpicklingError as error:
        refused = _REFUSED_BY_TORCH.search(str(error))
        if refused is not None:
            raise UnsafeFileError(
                f"its file {name} refers to {refused.group(1)[:_MAX_NAME_CHARS]}"
            ) from error
        reason = str(error).partition("\n")[0]
        # NB: torch suggests to read the file without restriction.
        reason = "has something else than tensors and numbers" if "Weights only" in reason else reason
        raise pickle.UnpicklingError(f"its file {name} {reason}") from error


@contextmanager
def _keep_attributes() -> Iterator[None]:
    """Restore the attributes of the allowed classes.

    NB: a pickle can set attributes of whatever it has found, also of a class.

    Raises:
        _ForbiddenError: an attribute has changed.
    """
    originals = {key: dict(vars(value)) for key, value in _ALLOWED.items()}
    try:
        yield
    finally:
        changed = [key for key, value in _ALLOWED.items() if dict(vars(value)) != originals[key]]
        for key in changed:
            _restore(_ALLOWED[key], originals[key])
    if changed:
        raise _ForbiddenError(f"changes {'.'.join(changed[0])}")


def _restore(value: Any, attributes: dict[str, Any]) -> None:
    for name in vars(value).keys() - attributes.keys():
        delattr(value, name)
    for name, attribute in attributes.items():
        if vars(value)[name] is not attribute:
            setattr(value, name, attribute)
