"""Where things are kept: one cache folder for the machine, one state folder for each cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from support.cache import cache

PACKAGE = Path(__file__).resolve().parent
REPOSITORY = PACKAGE.parent.parent


class ClusterError(RuntimeError):
    """An error that the user can act on; the message says how."""


@dataclass(frozen=True)
class State:
    """The state folder of one cluster."""

    name: str

    def __post_init__(self) -> None:
        # NB: the name becomes a path that `down` removes.
        if re.fullmatch(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", self.name) is None:
            raise ClusterError(
                f"{self.name!r} is no name for a cluster: lower case letters, digits, -, 20 at most"
            )

    @property
    def directory(self) -> Path:
        """All there is of the cluster on disk: removing it loses the cluster."""
        return clusters() / self.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One log a process."""
        return self.directory / "logs"

    @property
    def audit_log(self) -> Path:
        """The requests of ServiceAccounts to the API server (`cluster.audit`)."""
        return self.logs / "audit.log"

    @property
    def settings(self) -> Path:
        """The cluster's configuration: index, nodes, folder of the binaries."""
        return self.directory / "cluster.json"

    @property
    def process(self) -> Path:
        """Which process is the supervisor."""
        return self.directory / "supervisor.json"

    @property
    def progress(self) -> Path:
        """What the supervisor has done so far, a line a step."""
        return self.directory / "progress"

    @property
    def control(self) -> Path:
        """A folder of requests to the supervisor, a file each."""
        return self.directory / "control"

    @property
    def volumes(self) -> Path:
        """The folders behind PersistentVolumes."""
        return self.directory / "volumes"


def clusters() -> Path:
    """The folder of all clusters' state."""
    return cache() / "clusters"
