"""What a step allocates, sends between ranks and waits for, counted operation by operation, also on fake tensors.

torch's own FSDPMemTracker cannot be used: it refuses `torch.autograd.grad` in a forward pass, by which losses are computed in
chunks (torch 2.13). tests/unit/trainer/test_plan.py compares both where it works.
"""

from __future__ import annotations

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

# What memory is used for. Working memory is what one operation leaves for the next, gradients of activations included.
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "working")
# The CUDA caching allocator hands out multiples of this many bytes.
_BLOCK = 512
_SENDS = ("c10d", "_c10d_functional")
_SENDS_NOTHING = {"wait_tensor", "barrier", "monitored_barrier_"}
# Names of the same collective in torch's operators.
_COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "broadcast_": "broadcast",
}
# Operations whose result a CPU needs before it can go on: its value, or its shape.
_WAITS = {
    torch.ops.aten._local_scalar_dense.default,  # noqa: SLF001 - what item(), tolist() and bool() call
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.repeat_interleave.Tensor,
    torch.ops.aten._unique2.default,  # noqa: SLF001 - how torch names it
}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: how many, and the bytes of the larger of input and output of each, summed."""

    count: int
    size: int


class Accounting(TorchDispatchMode):
    """Counts what runs in its context on one device.

    Memory is that of storages, in blocks of the allocator; what an operation uses inside and frees is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Names of the operations for which a CPU waited."""
        self._device = device
        self._sent: dict[str, list[int]] = defaultdict(list)
        # Allocations, frees and resizes in their order: a storage's number, and by how many bytes it grew.
        self._changes: list[tuple[int, int]] = []
        self._sizes: dict[int, int] = {}
        # The number of each storage that lives, by its address.
        self._numbers: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._watching = ExitStack()
        self._shapes = _Shapes()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The collectives by kind."""
        return {name: Traffic(len(sizes), sum(sizes)) for name, sizes in sorted(self._sent.items())}

    def of_kind(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what some tensors are for, whatever was said before."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._kinds[self._track(local.untyped_storage())] = kind

    def alive(self, kind: str) -> None:
        """Say what everything is for that lives now, and of which nothing was said."""
        for number, size in self._sizes.items():
            if size:
                self._kinds.setdefault(number, kind)

    def peak(self) -> dict[str, int]:
        """Return the bytes of each kind when most was in use.

        What belongs to the optimizer counts from the beginning: it lives from the first step to the last.
        """
        lasting = {number for number, kind in self._kinds.items() if kind == "optimizer"}
        held = sum(self._sizes[number] for number in lasting)
        used = most = held
        at = 0
        for place, (number, change) in enumerate(self._changes):
            used += 0 if number in lasting else change
            if used > most:
                most, at = used, place + 1
        found = dict.fromkeys(KINDS, 0)
        found["optimizer"] = held
        for number, change in self._changes[:at]:
            if number not in lasting:
                found[self._kinds.get(number, "working")] += change
        return found

    def __enter__(self) -> Self:
        self._watching.enter_context(self._resizes_seen())
        self._watching.enter_context(self._shapes_unseen())
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._watching.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._shapes.sought:
            return func(*args, **(kwargs or {}))
        if func in _WAITS and not _knows(args, kwargs or {}):
            self.waits.append(str(func))
        found = func(*args, **(kwargs or {}))
        if func.namespace in _SENDS:
            self._count(func, args, found)
        for value in tree_iter(found):
            if isinstance(value, torch.Tensor) and value.device == self._device:
                self._track(value.untyped_storage())
        return found

    def _count(self, func: Any, args: tuple[Any, ...], found: Any) -> None:
        name = func.name().split("::")[1].split(".")[0]
        if name in _SENDS_NOTHING:
            return
        if _COLLECTIVES.get(name) == "all-gather":
            self._kinds.setdefault(self._track(args[0].untyped_storage()), "gathered")
        sizes = [value.nbytes for value in tree_iter((args, found)) if isinstance(value, torch.Tensor)]
        self._sent[_COLLECTIVES.get(name, name)].append(max(sizes))

    def _track(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage, a new one where it was not seen before."""
        address = _address(storage)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._sizes)
            self._sizes[number] = 0
            weakref.finalize(storage, self._freed, address)
        self._changed(number, storage.nbytes())
        return number

    def _changed(self, number: int, size: int) -> None:
        size = -(-size // _BLOCK) * _BLOCK
        if size != self._sizes[number]:
            self._changes.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _freed(self, address: int) -> None:
        self._changed(self._numbers.pop(address), 0)

    @contextmanager
    def _resizes_seen(self) -> Iterator[None]:
        """See the storages that FSDP empties and fills again: no operation does that."""
        resize = torch.UntypedStorage.resize_

        def seen(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            number = self._numbers.get(_address(storage))
            if number is not None:
                self._changed(number, storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = seen
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    @contextmanager
    def _shapes_unseen(self) -> Iterator[None]:
        """Count nothing while DTensor finds the shapes of a result: it computes on fake tensors of whole size for that."""
        lock = ShardingPropagator._fake_mode_lock  # noqa: SLF001 - the one place around it
        ShardingPropagator._fake_mode_lock = self._shapes  # noqa: SLF001
        try:
            yield
        finally:
            ShardingPropagator._fake_mode_lock = lock  # noqa: SLF001


class _Shapes:
    """Stands where DTensor takes a lock while it finds shapes."""

    def __init__(self) -> None:
        self.sought = False

    def __enter__(self) -> None:
        self.sought = True

    def __exit__(self, *error: object) -> None:
        self.sought = False


def _knows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation need not wait: it is told the size of its output, or its input is a constant of the host."""
    return kwargs.get("output_size") is not None or getattr(args[0], "constant", None) is not None


def _address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)  # noqa: SLF001 - what tells storages apart
