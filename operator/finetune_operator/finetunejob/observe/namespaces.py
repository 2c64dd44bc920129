"""Reads the uids of namespaces, which distinguish the runs of clusters that log to the same MLflow server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from finetune_crds import contract
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# NB: a namespace that is deleted and created again has another uid.
_CACHE_SECONDS = 300.0
_MAX_CACHED = 4096


@dataclass
class NamespaceReader:
    """Reads a namespace at most once in five minutes, even if it does not exist or the operator is not allowed to read it.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _cached: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    """By namespace: when it was read, and its uid."""

    async def build_tags(self, namespace: str) -> dict[str, str]:
        """The tag of a run with the uid of its job's namespace; empty if the uid is unknown."""
        uid = await self.read_uid(namespace)
        return {contract.TAG_NAMESPACE_UID: uid} if uid else {}

    async def read_uid(self, namespace: str) -> str | None:
        """The uid of a namespace; None if it does not exist or cannot be read."""
        now = self.clock()
        cached = self._cached.get(namespace)
        if cached is None or now - cached[0] >= _CACHE_SECONDS:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            try:
                cached = (now, await self._read(namespace))
            except KubeError as error:
                # The API server may respond next time.
                log.info("namespace %s cannot be read: %s", namespace, error)
                return None
            self._cached[namespace] = cached
        return cached[1]

    async def _read(self, namespace: str) -> str | None:
        try:
            body = await self.kube.get("Namespace", "", namespace)
        except KubeError as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            log.info("the operator is not allowed to read namespace %s: %s", namespace, error)
            return None
        return str(body["metadata"]["uid"]) if body else None
