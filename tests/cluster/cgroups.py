"""The control groups that containers run in: the one thing of a cluster that no namespace takes along."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """Where the hierarchies are mounted: version 1 has one for each controller, version 2 is one."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [entry for entry in ROOT.iterdir() if (entry / "cgroup.procs").exists() and not entry.is_symlink()]


def create(group: str) -> None:
    """Make a group in every hierarchy, with all that its parents may give."""
    for hierarchy in hierarchies():
        folder = hierarchy
        for name in group.strip("/").split("/"):
            parent, folder = folder, folder / name
            controllers = parent / "cgroup.controllers"
            if hierarchy == ROOT and controllers.exists():
                for controller in controllers.read_text().split():
                    _write(parent / "cgroup.subtree_control", f"+{controller}")
            folder.mkdir(exist_ok=True)
            # NB: in version 1 a new group accepts no process before its processors and memory nodes are set.
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (folder / setting).exists():
                    _write(folder / setting, (parent / setting).read_text())


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content)
    except OSError:
        return


def folders(group: str) -> list[Path]:
    """The folders of a group, one in each hierarchy it is in."""
    return [folder for hierarchy in hierarchies() if (folder := hierarchy / group.strip("/")).is_dir()]


def processes(group: str) -> set[int]:
    """The processes in a group and all below it, numbered as the caller's PID namespace does."""
    pids: set[int] = set()
    for folder in folders(group):
        for file in folder.rglob("cgroup.procs"):
            try:
                pids.update(int(line) for line in file.read_text().split())
            except OSError:
                continue
    return pids - {0}


def kill(group: str, timeout: float = 10) -> None:
    """Kill every process in a group, those that appear meanwhile too."""
    deadline = time.monotonic() + timeout
    while (alive := processes(group)) and time.monotonic() < deadline:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def remove(group: str, timeout: float = 10) -> None:
    """Remove a group and all below it; its processes must be gone or going."""
    deadline = time.monotonic() + timeout
    while (remaining := folders(group)) and time.monotonic() < deadline:
        for top in remaining:
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    Path(folder).rmdir()
                except OSError:
                    continue
        time.sleep(0.05)
