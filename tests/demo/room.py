"""Whether this machine has the disk and the Go that a demo needs: `python -m demo.room`, before anything is installed.

It needs Python alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cluster import binaries
from cluster.paths import ClusterError
from support.cache import cache

GB = 10**9
# What the Python packages take; what the first demo writes besides; and a later one, whose programs are in the cache, when the
# packages of the images changed.
PACKAGES_GB, FIRST_GB, LATER_GB = 5, 10, 5
# A kubelet that has less than one hundredth of the disk left puts a taint on its node, and pods stay Pending.
FREE_SHARE = 0.02


def refusal(total: int, free: int, *, built: bool, installed: bool) -> str | None:
    """Why a run would fill a disk; None when it has room.

    Args:
        total: bytes of the disk.
        free: bytes that are free.
        built: whether the cache has the images of an earlier run.
        installed: whether the virtual environment is there.
    """
    run = (LATER_GB if built else FIRST_GB) + (0 if installed else PACKAGES_GB)
    required_bytes = run * GB + FREE_SHARE * total
    if free >= required_bytes:
        return None
    prune = "; or remove the images with `make prune`, which every cluster that shares this cache then builds again"
    return (
        f"the disk of {cache()} has {free / GB:.0f} GB free, and {'a later' if built else 'the first'} run on a local cluster "
        f"needs {required_bytes / GB:.0f} GB, {run} and two hundredths of the disk: on a full disk Kubernetes leaves pods Pending. Free "
        f"some, or set FINETUNE_CACHE to a folder on another disk{prune if built and installed else ''}"
    )


def check() -> str | None:
    """The refusal for the disk of the cache."""
    folder = cache()
    disk = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists()))
    # The folder of cluster.builder, which needs the packages.
    built = (folder / "buildah").exists()
    return refusal(disk.total, disk.free, built=built, installed=Path(".venv/.installed").exists())


def is_local() -> bool:
    """Whether the cluster is made on this machine, as cluster.backends chooses it."""
    backend_name = os.environ.get("CLUSTER", "")
    return backend_name == "local" or (
        not backend_name and os.geteuid() == 0 and Path("/etc/debian_version").exists()
    )


def main() -> str | None:
    """Return the error to end with."""
    try:
        binaries.check("kubectl", "helm", "versitygw")
    except ClusterError as error:
        return f"error: {error}"
    refused = check() if is_local() else None
    return refused and f"error: {refused}"


if __name__ == "__main__":
    sys.exit(main())
