"""The shards of a checkpoint: the state in them, DCP's writer and reader, and their errors."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError, first_line
from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint.restricted_pickle import (
    UnsafeFileError,
    load_metadata,
    name_unsafe_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.metadata import Metadata

# The frozen base of an adapter is not part of a checkpoint.
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
_MAX_MESSAGE_CHARS = 300
# The entries that bitsandbytes saves with a 4-bit weight (bitsandbytes.functional.QuantState).
_QUANTIZED = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)$"
)


class _Files(FileSystem):
    """Lets DCP use the file system that `filesystems` opens for a URI; DCP's own class would take a volume of Unity Catalog for a local folder."""

    def init_path(self, path: str | os.PathLike[str], **_: Any) -> str | os.PathLike[str]:
        """Open the file system of a URI."""
        self.fs, _path = filesystems.open_filesystem(os.fspath(path))
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder."""
        filesystems.make_folder(self.fs, os.fspath(path))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; errors of its content name it."""
        with name_unsafe_file(PurePosixPath(path).name), super().create_stream(path, mode) as stream:
            yield stream


class Writer(FsspecWriter):
    """Raises storage errors as OSError: the errors of some clients cannot be pickled for the other ranks."""

    def __init__(self, uri: str) -> None:
        # NB: nothing is copied ahead: the data of an asynchronous save is on the host already. Copying would wait every few megabytes for
        # the thread's CUDA stream, which on the first GPU is the stream of the training.
        super().__init__(uri, per_thread_copy_ahead=0, **filesystems.build_options(uri))
        self.fs = _Files()
        self.fs.init_path(uri)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Create the folder."""
        with _raise_plain_errors():
            return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        with _raise_plain_errors():
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the metadata of all shards."""
        with _raise_plain_errors():
            super().finish(metadata, results)


class Reader(FsspecReader):
    """Reads the shards at a URI that `filesystems` supports."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, **filesystems.build_options(uri))
        self.fs = _Files()
        self.fs.init_path(uri)

    def read_metadata(self, *_: Any, rank: int | None = None, **__: Any) -> Metadata:
        """Read the metadata; `rank`: of the shards of one rank, which DCP looks for if there is none of all shards.

        Raises:
            UnsafeFileError: the file refers to something that the trainer never writes.
        """
        with self.fs.create_stream(self._get_metadata_path(rank), "rb") as file:
            metadata = load_metadata(file)
        # As DCP's own reader does.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextmanager
def _raise_plain_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = filesystems.describe_failure(error)
        if reason is None:
            raise
        raise OSError(reason) from None


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Return the first rank that failed, and its error."""
    rank = min(error.failures)
    cause, _traceback = error.failures[rank]
    return rank, cause


def build_read_error(uri: str, cause: BaseException, remedy: str, *, shared: bool) -> PodFailure:
    """Return the error for an unreadable checkpoint: it is unsafe, damaged or gone, or its storage failed.

    Args:
        uri: of the checkpoint.
        cause: the error of the read.
        remedy: what to do if the checkpoint is damaged or unsafe.
        shared: whether another job writes and deletes checkpoints in the folder of this checkpoint.
    """
    if isinstance(cause, UnsafeFileError):
        return RecipeRefusedError(
            f"the checkpoint {uri} is unsafe ({cause}, which the trainer never writes; nothing of it was run): find out who can write to "
            f"this folder, and {remedy}",
            reason="CheckpointUnsafe",
        )
    reason = filesystems.describe_failure(cause)
    if shared and isinstance(cause, FileNotFoundError):
        # NB: the checkpoint's files existed when the attempt chose it, so the other job has deleted them since.
        return TrainingError(
            "CheckpointUnreadable",
            f"the checkpoint {uri} of another job was deleted before it was read: the next attempt looks for another one",
        )
    if reason is not None and not isinstance(cause, FileNotFoundError):
        return TrainingError("CheckpointUnreadable", f"the checkpoint {uri} cannot be read: {reason}")
    return RecipeRefusedError(
        f"the checkpoint {uri} is damaged ({first_line(cause)[:_MAX_MESSAGE_CHARS]}): {remedy}",
        reason="CheckpointDamaged",
    )


def get_trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the trained weights, by name; all ranks must take part."""
    # NB: of a frozen weight with two names, ignore_frozen_params drops only one name.
    frozen = {
        name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad
    }
    state: dict[str, torch.Tensor] = get_model_state_dict(model, options=TRAINED_ONLY)
    return {
        name: value for name, value in state.items() if name not in frozen and not is_of_frozen_weight(name)
    }


def is_of_frozen_weight(name: str) -> bool:
    """Whether an entry belongs to a frozen 4-bit weight; older checkpoints have these entries."""
    return _QUANTIZED.search(name) is not None


def get_training_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the state that a checkpoint holds: the trained weights and their optimizer state."""
    return {
        "model": get_trained_state(model),
        "optimizer": get_optimizer_state_dict(model, tuple(optimizers), options=TRAINED_ONLY),
    }


def describe_other_model(stored: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the first weight whose shape differs or that one side lacks; None: the checkpoint has the same weights.

    Args:
        stored: the checkpoint's metadata of its tensors, by name.
        weights: the weights of the model, by name.
    """
    prefix = "model."
    stored_shapes = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in stored.items()
        if name.startswith(prefix) and not is_of_frozen_weight(name)
    }
    model_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(stored_shapes.keys() | model_shapes.keys()):
        if stored_shapes.get(name) != model_shapes.get(name):
            return f"{name} is {_format_shape(stored_shapes.get(name))} in the checkpoint and {_format_shape(model_shapes.get(name))} in the model"
    return None


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def describe_other_optimizer(
    stored: Mapping[str, Any], moments: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Describe the first optimizer tensor that a checkpoint has in another type; None: all types are the same.

    NB: DCP converts types, and would take the codes of 8-bit moments for their values.

    Args:
        stored: the checkpoint's metadata of its tensors, by name.
        moments: the optimizer state of each weight, by the weight's name.
    """
    for weight, state in moments.items():
        for name, value in state.items():
            properties = getattr(stored.get(f"optimizer.state.{weight}.{name}"), "properties", None)
            if properties is not None and properties.dtype != value.dtype:
                return f"whose optimizer stored {name} of {weight} as {properties.dtype} instead of {value.dtype}"
    return None


def build_stager(*, pinned: bool) -> DefaultStager:
    """Return a stager that copies the state to the host; pinned memory makes copies from a GPU faster."""
    options = StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=False,
        # The optimizer changes tensors in place, so the next step must wait for the copy.
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )
    return DefaultStager(options)
