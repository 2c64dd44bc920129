"""Reads the pickles of a checkpoint without running what they say: only the classes that DCP writes are created.

NB: DCP itself reads `.metadata` with `pickle.load`, and entries that are no tensors with `torch.load(weights_only=False)`. Both
run any code that a file names, with the credentials of the pod.
"""

from __future__ import annotations

import pickle
import re
import struct
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.serialization
from torch.distributed.checkpoint import DefaultLoadPlanner, filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import set_element

from finetune_trainer.pod.exit_status import first_line
from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator
    from typing import IO

    from torch.distributed.checkpoint import ReadItem

# The classes that `.metadata` has instances of. They are created empty, and then BUILD sets their fields.
_CLASSES: dict[tuple[str, str], type] = {
    (value.__module__, value.__qualname__): value
    for value in (
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata.TensorStorageMetadata,
        filesystem._StorageInfo,  # noqa: SLF001 - where an entry is
    )
}
_FIELDS = {value: frozenset(field.name for field in fields(value)) for value in _CLASSES.values()}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = {encoding.value: encoding for encoding in dcp_metadata._MEM_FORMAT_ENCODING}  # noqa: SLF001 - a field of TensorProperties
# Tensors have far fewer dimensions. Without a limit, a file could let the reader copy one long tuple many times.
_MAX_DIMENSIONS = 64
# How torch names what its own restricted reader refuses, in a message of many lines that suggests to read the file without restriction.
_REFUSED_BY_TORCH = re.compile(r"GLOBAL ([\w.]+) w")
_MAX_NAME_CHARS = 100


class UnsafeFileError(Exception):
    """A file of a checkpoint has something that the trainer never writes; the message has the file and the reason."""


class _ForbiddenError(pickle.UnpicklingError):
    """A pickle refers to something that no checkpoint has."""


def _find_layout(name: str) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise _ForbiddenError("has an unknown layout")
    return _LAYOUTS[name]


def _find_memory_format(code: int) -> Any:
    if type(code) is not int or code not in _MEMORY_FORMATS:
        raise _ForbiddenError("has an unknown memory format")
    return _MEMORY_FORMATS[code]


def _find_member(enumeration: Callable[[Any], Any], name: str) -> Any:
    """Return a memory format by its name. NB: Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of `getattr`."""
    members = dcp_metadata._MEM_FORMAT_ENCODING.__members__  # noqa: SLF001 - a field of TensorProperties
    if enumeration is not _find_memory_format or type(name) is not str or name not in members:
        raise _ForbiddenError("refers to builtins.getattr")
    return members[name]


def _build_size(dimensions: tuple[int, ...]) -> torch.Size:
    if type(dimensions) is not tuple or len(dimensions) > _MAX_DIMENSIONS:
        raise _ForbiddenError("has a size that no tensor has")
    return torch.Size(dimensions)


# What `.metadata` calls. NB: these functions stand in for those of torch, so that a file gets hold of no function that anything else uses.
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): _find_member,
    ("torch", "Size"): _build_size,
    ("torch.serialization", "_get_layout"): _find_layout,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _find_memory_format,
}
# What pickle writes for metadata, in each protocol since 2. The others call other things, or need hashes: of nested tuples, a hash can take
# years.
_OPCODES: list[bytes] = [
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.GLOBAL, pickle.STACK_GLOBAL,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
    pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
]  # fmt: skip
# What these instructions raise for a damaged file.
_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)


# NB: the unpickler in C lets nobody check an instruction.
_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001 - the methods for its instructions are replaced below


class _Unpickler(_PythonUnpickler):
    """Creates and changes only what it has created itself."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DCP's metadata, a data type of torch, or a function in the place of one of torch.

        Raises:
            _ForbiddenError: for anything else.
        """
        allowed = _CLASSES.get((module, name)) or _FUNCTIONS.get((module, name))
        if allowed is not None:
            return allowed
        # NB: a plain attribute of the module: getattr with a dotted name would not find one.
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise _ForbiddenError(f"refers to {f'{module}.{name}'[:_MAX_NAME_CHARS]}")

    def load_reduce(self) -> None:
        """Call one of the functions."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not any(function is allowed for allowed in _FUNCTIONS.values()):
            raise _ForbiddenError("calls what is no function of metadata")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        """Create an empty instance of one of the classes."""
        arguments = self.stack.pop()
        created = self.stack.pop()
        if arguments != () or not any(created is allowed for allowed in _CLASSES.values()):
            raise _ForbiddenError("creates what is no part of metadata")
        self.append(created.__new__(created))

    def load_build(self) -> None:
        """Set the fields of an instance of one of the classes."""
        state = self.stack.pop()
        built = self.stack[-1]
        # NB: not isinstance: of a class, a function or an enum, the attributes would stay changed after the read.
        if type(built) not in _FIELDS:
            raise _ForbiddenError(
                f"changes {built.__qualname__ if isinstance(built, type) else f'a {type(built).__name__}'}"
            )
        if type(built) is dcp_metadata.TensorProperties and type(state) is tuple:
            built.__setstate__(state)
            return
        if type(state) is not dict or not state.keys() <= _FIELDS[type(built)]:
            raise _ForbiddenError(f"has other fields than those of {type(built).__name__}")
        vars(built).update(state)

    def load_setitem(self) -> None:
        """Set an item of a dict."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        """Set items of a dict."""
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        """Set items of the dict on top of the stack; `items`: keys and values in turn."""
        target = self.stack[-1]
        if type(target) is not dict:
            raise _ForbiddenError(f"has items of {type(target).__name__}")
        for key in items[::2]:
            _check_key(key)
        target.update(zip(items[::2], items[1::2], strict=True))

    def _refuse(self) -> None:
        raise _ForbiddenError("has an instruction that metadata does not need")

    dispatch: ClassVar = {
        **dict.fromkeys(_PythonUnpickler.dispatch, _refuse),
        **{code[0]: _PythonUnpickler.dispatch[code[0]] for code in _OPCODES},
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _check_key(key: Any) -> None:
    """Check a key before it is hashed: a name, or the index of an entry."""
    if type(key) is dcp_metadata.MetadataIndex:
        is_key = type(key.fqn) is str and (key.offset is None or type(key.offset) is torch.Size)
    else:
        is_key = type(key) is str
    if not is_key:
        raise _ForbiddenError(f"has a key of type {type(key).__name__}")


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
    try:
        metadata = _Unpickler(file).load()
    except _DAMAGE as error:
        raise pickle.UnpicklingError(f"is damaged ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(metadata, dcp_metadata.Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("has no metadata")
    paths: list[Any] = [getattr(info, "relative_path", None) for info in metadata.storage_data.values()]
    if not all(type(path) is str for path in paths):
        raise pickle.UnpicklingError("has an entry without a file")
    for path in set(paths):
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
