"""Which kind of cluster: of our own, kind's, or one that is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cluster import current, images, kind, local
from cluster.paths import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Backend(Protocol):
    """What every kind of cluster can do; a module of functions is one."""

    def up(self, name: str, nodes: int = 2) -> Path:
        """Bring it up, or find it up; return its kubeconfig's path."""

    def down(self, name: str) -> None:
        """Take it away."""

    def status(self, name: str) -> dict[str, object]:
        """Say what there is of it."""

    def prepare(self) -> None:
        """Make what a cluster can begin with, programs and images, before it is brought up."""

    def build_images(self, name: str, project_images: list[images.Image]) -> dict[str, str]:
        """Make the project's images available to it; return their references by variable."""


BACKENDS: Mapping[str, Backend] = {"local": local, "kind": kind, "current": current}


def choose(environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Which backend to use, and why, in a sentence."""
    environment = os.environ if environment is None else environment
    backend_name = environment.get("CLUSTER", "")
    if backend_name:
        if backend_name not in BACKENDS:
            raise ClusterError(f"CLUSTER={backend_name} is none of {', '.join(BACKENDS)}")
        return backend_name, f"using the {backend_name} cluster, as CLUSTER says"
    if can_be_local():
        return (
            "local",
            "using a local cluster, this being Debian or Ubuntu and we root; set CLUSTER for another",
        )
    if kind.has_docker():
        return "kind", "using kind, since a Docker engine answers; set CLUSTER for another"
    if environment.get("KUBECONFIG"):
        return "current", "using the cluster that KUBECONFIG says, since none can be made here"
    raise ClusterError(
        "no cluster can be had: be root on Debian or Ubuntu, or start a Docker engine and install kind, "
        "or set KUBECONFIG to a cluster"
    )


def can_be_local() -> bool:
    """Whether a cluster of our own can run: as root, with apt's packages."""
    return sys.platform == "linux" and os.geteuid() == 0 and Path("/etc/debian_version").exists()
