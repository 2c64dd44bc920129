"""Reads the uids of namespaces, which distinguish the runs of clusters that log to the same MLflow server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from finetune_crds import contract
from finetune_operator.finetunejob.observe.shared_answers import SharedAnswers
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# NB: a namespace that is deleted and created again has another uid, so the answer expires.
_CACHE_SECONDS = 300.0


@dataclass
class NamespaceReader:
    """Reads a namespace at most once in five minutes, even if it does not exist or the operator is not allowed to read it.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._uids = SharedAnswers[str | None](self.clock, _CACHE_SECONDS)

    async def build_tags(self, namespace: str) -> dict[str, str]:
        """The tag of a run with the uid of its job's namespace; empty if the uid is unknown."""
        uid = await self.read_uid(namespace)
        return {contract.TAG_NAMESPACE_UID: uid} if uid else {}

    async def read_uid(self, namespace: str) -> str | None:
        """The uid of a namespace; None if it does not exist or cannot be read."""
        try:
            return await self._uids.answer(namespace, partial(self._read, namespace))
        except KubeError as error:
            log.info("namespace %s cannot be read: %s", namespace, error)
            return None

    async def _read(self, namespace: str) -> str | None:
        try:
            body = await self.kube.get("Namespace", "", namespace)
        except KubeError as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            log.info("the operator is not allowed to read namespace %s: %s", namespace, error)
            return None
        return str(body["metadata"]["uid"]) if body else None
