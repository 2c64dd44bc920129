"""Reads and writes the rows of a sharded parameter that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard


def set_rows(parameter: torch.Tensor, value: Any) -> None:
    """Copy this rank's rows of an unsharded value, a tensor or a slice of a file, into a parameter."""
    local_tensor, local_slice = local_rows(parameter)
    if local_tensor.numel():
        with torch.no_grad():
            local_tensor.copy_(value[local_slice])


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """Return this rank's shard of a parameter, and the rows that it covers; rows are sharded over one dimension of the mesh.

    For example, of a parameter of 8 rows over four ranks, the second rank holds slice(2, 4).
    """
    if not isinstance(parameter, DTensor):
        return parameter, slice(None)
    local_tensor, begin, mesh = parameter.to_local(), 0, parameter.device_mesh
    # NB: torch's own function for several dimensions reads an index from a tensor, which waits for the GPU and fails on fake tensors.
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            _, begin = Shard.local_shard_size_and_offset(
                len(parameter), mesh.size(dimension), mesh.get_local_rank(dimension)
            )
    return local_tensor, slice(begin, begin + len(local_tensor))
