"""The devices of the ranks of a pod: its visible GPUs, or its CPUs."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune_crds import contract
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_crds.recipe import Recipe

# Larger models train on CPUs only with distributed.device: CPU.
_MAX_CPU_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this pod sees.

    count: how many.
    torch_for_cpus: the version of torch if it is built for CPUs only; None if it can use GPUs.
    """

    count: int
    torch_for_cpus: str | None = None

    @classmethod
    def visible(cls) -> Gpus:
        """Count the visible GPUs."""
        if torch.version.cuda is None and torch.version.hip is None:
            return cls(0, torch.__version__)
        return cls(torch.cuda.device_count() if torch.cuda.is_available() else 0)

    @property
    def reason_for_none(self) -> str:
        """Explain why the pod sees no GPU, with what to check, as the end of a sentence."""
        if self.torch_for_cpus is not None:
            return (
                f"the image has torch {self.torch_for_cpus}, which is built for CPUs: set pods.train.image to an image "
                "that is built for CUDA"
            )
        return "check that the pod requests GPUs, and that its node has the driver and the device plugin"


@dataclass(frozen=True)
class Card:
    """The GPU that a rank computes on.

    name: as its driver names it.
    memory: in bytes.
    capability: its compute capability, major and minor.
    """

    name: str
    memory: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> Card | None:
        """Return the card of a device; None for a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, properties.total_memory, (properties.major, properties.minor))


def check(recipe: Recipe, processes: int, gpus: Gpus, parameters: Callable[[], int]) -> None:
    """Check that the pod has the device that a recipe asks for, or needs.

    Args:
        recipe: the recipe.
        processes: ranks of this pod.
        gpus: the GPUs that this pod sees.
        parameters: counts the parameters of the base model; called only if the check depends on the count.

    Raises:
        RecipeRefusedError: GPUs are missing, or fewer than ranks.
    """
    device, requested_gpus, base = (
        recipe.distributed.device,
        recipe.distributed.gpus_per_node,
        recipe.model.base,
    )
    if device == "CPU":
        return
    if gpus.count:
        if processes > gpus.count:
            raise RecipeRefusedError(
                f"the pod has {processes} processes and sees {_format_count(gpus.count)}: "
                + _explain_too_few_gpus(processes, gpus.count, requested_gpus),
                reason="TooFewGpus",
            )
        return
    if device == "GPU" or requested_gpus is not None:
        field = "device is GPU" if requested_gpus is None else f"gpusPerNode is {requested_gpus}"
        raise RecipeRefusedError(
            f"distributed.{field} and the pod sees no GPU; {gpus.reason_for_none}", reason="NoGpu"
        )
    size = parameters()
    if size > _MAX_CPU_PARAMETERS:
        raise RecipeRefusedError(
            f"model.base {base} has {size / 1e9:.1f} billion parameters and the pod sees no GPU: set "
            "distributed.gpusPerNode, or distributed.device: CPU to train it on CPUs"
            + (f"; {gpus.reason_for_none}" if gpus.torch_for_cpus else ""),
            reason="NoGpu",
        )


def _explain_too_few_gpus(processes: int, visible: int, requested_gpus: int | None) -> str:
    """Return what to change if there are fewer GPUs than processes."""
    fewer_processes = f"distributed.processesPerNode to {visible} or less"
    if requested_gpus is not None and requested_gpus >= processes:
        return f"set {fewer_processes}, since a pod sees only one device of some resources, for example MIG"
    return f"set distributed.gpusPerNode to {processes}, or {fewer_processes}"


def _format_count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def tags(device: torch.device) -> dict[str, str]:
    """Return the tags of a run that describe its device."""
    is_gpu = device.type == "cuda"
    return {
        contract.TAG_DEVICE: "GPU" if is_gpu else "CPU",
        contract.TAG_DEVICE_NAME: torch.cuda.get_device_name(device) if is_gpu else _cpu_name(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
