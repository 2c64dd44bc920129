"""The plan of a cluster: its name, its nodes, and its addresses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cluster.paths import ClusterError

if TYPE_CHECKING:
    from pathlib import Path

MOST_CLUSTERS = 63
MOST_NODES = 9
API_PORT = 6443
DOMAIN = "cluster.local"
HOST_NAME = "host.cluster.internal"


@dataclass(frozen=True)
class Plan:
    """The settings of one cluster, numbered so that several have no address in common.

    Between this machine and the cluster's network namespace lies 10.241.<index>.0/30; pods and nodes share a
    bridge on 10.244.<4 x index>.0/22, Services are 10.248.<4 x index>.0/22. This machine has routes to all.
    """

    name: str
    index: int
    nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ClusterError(f"{self.nodes} nodes: between 1 and {MOST_NODES} can be had")

    @property
    def host_link(self) -> str:
        """The end of the cable on this machine's side."""
        return f"finetune{self.index}"

    @property
    def host_address(self) -> str:
        """Where pods reach this machine."""
        return f"10.241.{self.index}.1"

    @property
    def address(self) -> str:
        """Where this machine reaches the API server."""
        return f"10.241.{self.index}.2"

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{self.address}:{API_PORT}"

    @property
    def pods(self) -> str:
        """The range of pods' and nodes' addresses."""
        return f"10.244.{4 * self.index}.0/22"

    @property
    def services(self) -> str:
        """The range of Services' addresses."""
        return f"10.248.{4 * self.index}.0/22"

    @property
    def gateway(self) -> str:
        """The bridge's own address, where CoreDNS answers."""
        return f"10.244.{4 * self.index}.1"

    @property
    def first_pod(self) -> str:
        """The first address that a pod may have."""
        return f"10.244.{4 * self.index}.16"

    def node_name(self, number: int) -> str:
        """The name of a node, counted from one."""
        return f"{self.name}-{number}"

    def node_address(self, number: int) -> str:
        """The address of a node, counted from one."""
        return f"10.244.{4 * self.index}.{1 + number}"

    @property
    def cgroup(self) -> str:
        """The control group above all its pods."""
        return f"/finetune-{self.name}"

    def save(self, file: Path) -> None:
        """Keep it."""
        file.write_text(json.dumps(asdict(self)) + "\n")


def load(file: Path) -> Plan | None:
    """A plan that was kept, if it was."""
    try:
        return Plan(**json.loads(file.read_text()))
    except (OSError, ValueError):
        return None
