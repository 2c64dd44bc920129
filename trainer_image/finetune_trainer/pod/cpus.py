"""The number of CPUs of this pod."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def count_cpus(cgroup: Path = _CGROUP) -> int:
    """Return the number of available CPUs: CPU affinity, limited by the pod's CPU limit; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _read_limit(cgroup)))


def _read_limit(cgroup: Path) -> int:
    """Return the CPU limit, rounded up as the JVM does, from cgroup v2 or v1; a large number without a limit."""
    unlimited = sys.maxsize
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return unlimited
    if quota in ("max", "-1"):
        return unlimited
    return math.ceil(int(quota) / int(period))
