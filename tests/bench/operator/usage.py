"""CPU time and memory of a process, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used, in user mode and in the kernel, all threads together."""
    return parse_cpu_seconds(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"), _TICKS)


def total_cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU time that several processes have used."""
    return sum(cpu_seconds(pid) for pid in pids)


def parse_cpu_seconds(stat: str, ticks: int) -> float:
    """The CPU time in a line of /proc/PID/stat."""
    # NB: the name of the program, in parentheses, may contain spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks


def memory_mib(pid: int) -> tuple[float, float]:
    """The resident memory of a process, now and at its peak."""
    return parse_memory_mib(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))


def parse_memory_mib(status: str) -> tuple[float, float]:
    """The resident memory in /proc/PID/status, now and at its peak."""
    sizes = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return int(sizes["VmRSS"]) / 1024, int(sizes["VmHWM"]) / 1024
