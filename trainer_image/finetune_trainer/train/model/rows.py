"""This rank's rows of parameters, and all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard


def set_rows(parameter: torch.Tensor, value: Any) -> None:
    """Copy this rank's rows of a value, a tensor or a slice of a file, into a parameter."""
    held, at = local_rows(parameter)
    if held.numel():
        with torch.no_grad():
            held.copy_(value[at])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, sharded or not; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's shard of a parameter, and the rows that it covers; ranks share rows over one dimension of the mesh."""
    if not isinstance(parameter, DTensor):
        return parameter, slice(None)
    held, begin, among = parameter.to_local(), 0, parameter.device_mesh
    # NB: torch's own function for several dimensions reads an index from a tensor, which a plan refuses as a wait for the GPU.
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            _, begin = Shard.local_shard_size_and_offset(
                len(parameter), among.size(dimension), among.get_local_rank(dimension)
            )
    return held, slice(begin, begin + len(held))
