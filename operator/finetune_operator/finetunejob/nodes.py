"""Labels of the nodes that training pods run on, as far as the operator may read nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from finetune_crds.base import Json
from finetune_operator.finetunejob.decide import device
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# The GPU of a node does not change.
_FRESH_SECONDS = 3600.0
_MOST_NODES = 4096


@dataclass
class NodeReader:
    """Reads a node once an hour, also one that it may not read.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _known: dict[str, tuple[float, Mapping[str, str]]] = field(default_factory=dict)
    """By node: when it was read, and its labels."""

    async def read(self, alive: Sequence[Json], named: str) -> dict[str, Mapping[str, str]]:
        """The labels of the node that tells which GPU the pods have; nothing for pods without GPUs, or without nodes.

        Args:
            named: a resource that counts as a GPU besides those with known names.
        """
        node = device.node_to_read(alive, named)
        if node is None:
            return {}
        now = self.clock()
        held = self._known.get(node)
        if held is None or now - held[0] >= _FRESH_SECONDS:
            if len(self._known) >= _MOST_NODES:
                self._known.clear()
            held = self._known[node] = (now, await self._labels(node))
        return {node: held[1]}

    async def _labels(self, node: str) -> Mapping[str, str]:
        try:
            body = await self.kube.get("Node", "", node)
        except KubeError as error:
            log.info("the labels of node %s cannot be read: %s", node, error)
            return {}
        return (body or {"metadata": {}})["metadata"].get("labels") or {}
