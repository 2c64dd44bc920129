"""The shards of a checkpoint: what goes into them, how they are written, and what is said when that fails."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from finetune_trainer.outcome import PodFailure, RecipeRefusedError, TrainingError
from finetune_trainer.train.runtime import storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn
    from torch.distributed.checkpoint import CheckpointException

# The frozen base of an adapter is not part of a checkpoint.
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


class Writer(FsspecWriter):
    """Tells storage errors in a form that can be sent to the other ranks: those of some clients cannot be pickled."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Make the folder."""
        with _plain_errors():
            return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's shards."""
        with _plain_errors():
            return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        """Write which shards there are."""
        with _plain_errors():
            super().finish(metadata, results)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = storage.failure(error)
        if said is None:
            raise
        raise OSError(said) from None


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed, and its error."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def unreadable(uri: str, cause: BaseException) -> PodFailure:
    """What to end with after a checkpoint could not be read: it is damaged, or its storage is away."""
    said = storage.failure(cause)
    if said is not None and not isinstance(cause, FileNotFoundError):
        return TrainingError("CheckpointUnreadable", f"the checkpoint {uri} cannot be read: {said}")
    first_line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)[:300]
    return RecipeRefusedError(
        f"the checkpoint {uri} is damaged ({first_line}): delete this folder to go on from an older checkpoint, or "
        "from the start where there is none",
        reason="CheckpointDamaged",
    )


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained, by name, each rank its shards; every rank must take part."""
    # NB: torch leaves out one name of a frozen weight: tied embeddings, the largest of all, would stay in.
    frozen = {
        name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad
    }
    state: dict[str, torch.Tensor] = get_model_state_dict(model, options=TRAINED_ONLY)
    return {name: value for name, value in state.items() if name not in frozen}


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds: the trained weights and what the optimizer knows of them."""
    return {
        "model": trained_state(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=TRAINED_ONLY),
    }


def stager(*, pinned: bool) -> DefaultStager:
    """Copies the state to the host; pinned memory, which is kept from save to save, takes GPU copies much faster."""
    options = StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=False,
        # The optimizer changes tensors in place, so the next step has to wait for the copy anyway.
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )
    return DefaultStager(options)


def options_of(uri: str) -> dict[str, Any]:
    """How readers and writers open a place."""
    return {"use_listings_cache": False} if storage.is_object_store(uri) else {}
