"""GPUs of nodes, if the operator may read nodes: the labels of nodes with training pods, and the resources of all nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator.batch.blockage import unschedulable_condition
from finetune_operator.finetunejob.draft import device
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# The GPU of a node does not change.
_CACHE_SECONDS = 3600.0
_MAX_CACHED_NODES = 4096
# Short enough to notice a new device plugin; listing all nodes of a cluster is expensive.
_OFFERED_CACHE_SECONDS = 120.0


class _NodeLabels(NamedTuple):
    """The labels of a node, and when they were read."""

    read_at: float
    labels: Mapping[str, str]


class _Offers(NamedTuple):
    """The resources that the nodes offer, or None if nodes cannot be read; and when they were read."""

    read_at: float
    resources: frozenset[str] | None


@dataclass
class NodeReader:
    """Reads a node at most once an hour, and lists all nodes at most every two minutes. A read that failed is not repeated earlier.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _labels_by_node: dict[str, _NodeLabels] = field(default_factory=dict)
    _offers: _Offers | None = None

    async def read(self, alive: Sequence[Json], gpu_resource: str) -> dict[str, Mapping[str, str]]:
        """Return {node: labels} for the node of the first scheduled pod with a GPU. These labels name the GPU product.

        Empty if no scheduled pod requests a GPU. The labels are empty if the node cannot be read.

        Args:
            alive: the pods that have not ended.
            gpu_resource: another resource that counts as a GPU, in addition to those with known names.
        """
        node = device.node_to_read(alive, gpu_resource)
        if node is None:
            return {}
        now = self.clock()
        cached = self._labels_by_node.get(node)
        if cached is None or now - cached.read_at >= _CACHE_SECONDS:
            if len(self._labels_by_node) >= _MAX_CACHED_NODES:
                self._labels_by_node.clear()
            cached = self._labels_by_node[node] = _NodeLabels(now, await self._read_labels(node))
        return {node: cached.labels}

    async def offered_resources(self, alive: Sequence[Json], gpu_resource: str) -> frozenset[str] | None:
        """The resources that at least one node offers; None if no pod waits for a GPU, or nodes cannot be read.

        Args:
            alive: the pods that have not ended.
            gpu_resource: another resource that counts as a GPU, in addition to those with known names.
        """
        if not any(unschedulable_condition(pod) and device.count_gpus(pod, gpu_resource) for pod in alive):
            return None
        now = self.clock()
        if self._offers is None or now - self._offers.read_at >= _OFFERED_CACHE_SECONDS:
            self._offers = _Offers(now, await self._read_resources())
        return self._offers.resources

    async def _read_resources(self) -> frozenset[str] | None:
        try:
            nodes = (await self.kube.list("Node", None)).objects
        except KubeError as error:
            log.info("nodes cannot be listed: %s", error)
            return None
        resources: set[str] = set()
        for node in nodes:
            allocatable = (node.get("status") or {}).get("allocatable") or {}
            resources.update(name for name, amount in allocatable.items() if str(amount) != "0")
        return frozenset(resources)

    async def _read_labels(self, node: str) -> Mapping[str, str]:
        try:
            body = await self.kube.get("Node", "", node)
        except KubeError as error:
            log.info("the labels of node %s cannot be read: %s", node, error)
            return {}
        if body is None:
            return {}
        return body["metadata"].get("labels") or {}
