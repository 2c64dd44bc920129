"""The programs that come from the distribution, installed by apt where they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from cluster.binaries import say
from cluster.paths import ClusterError
from support.cache import cache

if TYPE_CHECKING:
    from collections.abc import Sequence

SEARCHED = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"), Path("/usr/libexec/cni"))


@dataclass(frozen=True)
class Package:
    """A Debian package, and the programs by which one sees that it is there."""

    name: str
    programs: tuple[str, ...]

    def present(self) -> bool:
        """Whether its programs are on this machine, whoever installed them."""
        return all(shutil.which(program, path=SEARCHED) for program in self.programs)


NODES = (
    Package("containerd", ("containerd", "ctr")),
    Package("runc", ("runc",)),
    Package("iproute2", ("ip",)),
    Package("iptables", ("iptables", "iptables-save")),
    Package("util-linux", ("unshare", "nsenter", "setpriv")),
    Package("openssl", ("openssl",)),
)
IMAGES = (
    Package("buildah", ("buildah",)),
    Package("mmdebstrap", ("mmdebstrap",)),
)


def cni_folder() -> Path | None:
    """Where the CNI plugins are, if anywhere."""
    return next((folder for folder in CNI_FOLDERS if (folder / "bridge").exists()), None)


def postgres_folder() -> Path | None:
    """Where PostgreSQL's programs are, if anywhere: Debian keeps them off the path, the newest last."""
    programs = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda file: file.parts[-3].zfill(4)
    )
    return programs[-1].parent if programs else None


def ensure(*packages: Package, cni: bool = False, postgres: bool = False) -> None:
    """Install what is missing; needs root and apt only if something is."""
    if not _missing(packages, cni=cni, postgres=postgres):
        return
    # NB: apt-get update fails at once where another one runs.
    with FileLock(cache() / "apt.lock"):
        missing = _missing(packages, cni=cni, postgres=postgres)
        if missing:
            _install(missing)


def _missing(packages: Sequence[Package], *, cni: bool, postgres: bool) -> list[str]:
    missing = [package.name for package in packages if not package.present()]
    if cni and cni_folder() is None:
        missing.append("containernetworking-plugins")
    if postgres and postgres_folder() is None:
        missing.append("postgresql")
    return missing


def _install(missing: list[str]) -> None:
    package_names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"these programs are missing, install them: {package_names}")
    say(f"installing from the distribution: {package_names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *missing]
    for argv in (["apt-get", "update", "--quiet"], install):
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)} failed:\n{done.stderr.strip()[-2000:]}")
