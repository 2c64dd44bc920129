"""What the figures were taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "flash-attn")


def describe() -> dict[str, Any]:
    """Processor, memory, GPUs and versions, as the JSON has them."""
    import torch

    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        "cores": len(os.sched_getaffinity(0)),
        "memoryGiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpus[0] if gpus else None,
        "gpus": len(gpus),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def processor(cpuinfo: str) -> str:
    """The processor's name, out of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
