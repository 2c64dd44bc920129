"""This rank's rows of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def set_rows(parameter: torch.Tensor, value: Any) -> None:
    """Copy this rank's rows of a value, a tensor or a slice of a file, into a parameter."""
    held, at = local_rows(parameter)
    if held.numel():
        with torch.no_grad():
            held.copy_(value[at])


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's shard of a parameter, and the rows that it covers."""
    if not isinstance(parameter, DTensor):
        return parameter, slice(None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held = parameter.to_local()
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    begin = offset[0] if offset else 0
    return held, slice(begin, begin + len(held))
