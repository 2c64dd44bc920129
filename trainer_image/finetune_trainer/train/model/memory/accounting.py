"""Counts the memory, the collectives and the waits of a step, operation by operation, also on fake tensors.

torch's own FSDPMemTracker cannot be used: it does not support `torch.autograd.grad` in a forward pass (torch 2.13), where chunked
losses call it. tests/unit/trainer/test_plan.py compares the tracker with this module where the tracker works.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Kinds of memory. Working memory is everything that passes between operations, including gradients of activations.
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "working")
# The CUDA caching allocator allocates multiples of this many bytes.
_BLOCK_BYTES = 512
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_NOT_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}
# The collective that each of torch's operators runs.
_COLLECTIVE_KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast_": "broadcast",
}
# Operations after which the CPU waits for the GPU: it needs the value or the shape of the result.
_BLOCKING_OPERATIONS = {
    torch.ops.aten._local_scalar_dense.default,  # noqa: SLF001 - what item(), tolist() and bool() call
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten._unique2.default,  # noqa: SLF001 - how torch names it
}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: their number, and the sum of their sizes in bytes, each the larger of input and output."""

    count: int
    size: int


class Accounting(TorchDispatchMode):
    """Counts what runs in its context on one device.

    Memory is the size of storages, in blocks of the allocator. Temporary memory inside an operation is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Names of the operations after which the CPU waited for the GPU."""
        self._device = device
        self._collective_sizes: dict[str, list[int]] = defaultdict(list)
        # Storages are numbered in the order of their allocation. The number of each live storage, by its address.
        self._numbers: dict[int, int] = {}
        # Allocations, frees and resizes in their order: a storage's number, and by how many bytes it grew.
        self._changes: list[tuple[int, int]] = []
        # Bytes by the storage's number; 0 after it is freed.
        self._sizes: dict[int, int] = {}
        # One of KINDS, by the storage's number; without a kind, a storage is working memory.
        self._kinds: dict[int, str] = {}
        self._patches = ExitStack()
        self._shape_propagation = _ShapePropagation()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The collectives by kind."""
        return {
            name: Traffic(len(sizes), sum(sizes)) for name, sizes in sorted(self._collective_sizes.items())
        }

    def set_kind(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the kind of tensors, and replace an earlier kind."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._kinds[self._track(local.untyped_storage())] = kind

    def set_default_kind(self, kind: str) -> None:
        """Set the kind of all live storages that have no kind."""
        for number, size in self._sizes.items():
            if size:
                self._kinds.setdefault(number, kind)

    def compute_peak(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak.

        Optimizer states count from the beginning: they live from the first step to the last.
        """
        optimizer_storages = {number for number, kind in self._kinds.items() if kind == "optimizer"}
        optimizer_bytes = sum(self._sizes[number] for number in optimizer_storages)
        other_changes = [
            (number, growth) for number, growth in self._changes if number not in optimizer_storages
        ]
        used_bytes = peak_bytes = optimizer_bytes
        changes_until_peak = 0
        for count, (_, growth) in enumerate(other_changes, start=1):
            used_bytes += growth
            if used_bytes > peak_bytes:
                peak_bytes, changes_until_peak = used_bytes, count
        bytes_by_kind = dict.fromkeys(KINDS, 0)
        bytes_by_kind["optimizer"] = optimizer_bytes
        for number, growth in other_changes[:changes_until_peak]:
            bytes_by_kind[self._kinds.get(number, "working")] += growth
        return bytes_by_kind

    def __enter__(self) -> Self:
        self._patches.enter_context(self._watch_resizes())
        self._patches.enter_context(self._ignore_shape_propagation())
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        if any(issubclass(each, DTensor) for each in types):
            # DTensor runs the operation on local tensors, which are counted.
            return NotImplemented
        if self._shape_propagation.is_running:
            return func(*args, **(kwargs or {}))
        if _is_blocking(func, args, kwargs or {}):
            self.waits.append(str(func))
        output = func(*args, **(kwargs or {}))
        if func.namespace in _COLLECTIVE_NAMESPACES:
            self._count_collective(func, args, output)
        for value in tree_iter(output):
            if isinstance(value, torch.Tensor) and value.device == self._device:
                self._track(value.untyped_storage())
        return output

    def _count_collective(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        name = func.name().split("::")[1].split(".")[0]
        if name in _NOT_COLLECTIVES:
            return
        if _COLLECTIVE_KINDS.get(name) == "all-gather":
            # NB: FSDP also passes the output as the first argument, but DTensor passes only the input.
            gathered = next(value for value in tree_iter(output) if isinstance(value, torch.Tensor))
            self._kinds.setdefault(self._track(gathered.untyped_storage()), "gathered")
        sizes = [value.nbytes for value in tree_iter((args, output)) if isinstance(value, torch.Tensor)]
        self._collective_sizes[_COLLECTIVE_KINDS.get(name, name)].append(max(sizes))

    def _track(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, or assign a new number."""
        address = _address(storage)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes[number] = 0
            weakref.finalize(storage, self._record_free, address)
        self._record_size(number, storage.nbytes())
        return number

    def _record_size(self, number: int, size: int) -> None:
        allocated = math.ceil(size / _BLOCK_BYTES) * _BLOCK_BYTES
        if allocated != self._sizes[number]:
            self._changes.append((number, allocated - self._sizes[number]))
            self._sizes[number] = allocated

    def _record_free(self, address: int) -> None:
        self._record_size(self._numbers.pop(address), 0)

    @contextmanager
    def _watch_resizes(self) -> Iterator[None]:
        """Record the resizes of storages by FSDP, which are not operations."""
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            number = self._numbers.get(_address(storage))
            if number is not None:
                self._record_size(number, storage.nbytes())
            return resized

        torch.UntypedStorage.resize_ = resize_and_record
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    @contextmanager
    def _ignore_shape_propagation(self) -> Iterator[None]:
        """Count nothing while DTensor propagates shapes, which it does on unsharded fake tensors."""
        lock = ShardingPropagator._fake_mode_lock  # noqa: SLF001 - there is no public hook
        ShardingPropagator._fake_mode_lock = self._shape_propagation  # noqa: SLF001
        try:
            yield
        finally:
            ShardingPropagator._fake_mode_lock = lock  # noqa: SLF001


class _ShapePropagation:
    """Replaces the lock that DTensor holds while it propagates shapes."""

    def __init__(self) -> None:
        self.is_running = False

    def __enter__(self) -> None:
        self.is_running = True

    def __exit__(self, *error: object) -> None:
        self.is_running = False


def _is_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CPU waits for the result of an operation. Not if it knows the size from an argument, or the value as a constant."""
    if func not in _BLOCKING_OPERATIONS:
        return False
    is_size_an_argument = kwargs.get("output_size") is not None
    is_constant_on_host = getattr(args[0], "constant", None) is not None
    return not is_size_an_argument and not is_constant_on_host


def _address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)  # noqa: SLF001 - identifies a storage, also a fake one
