"""Closes the MLflow runs of jobs that were deleted while the operator was down.

A watch does not deliver what happened before it began, so the runs are searched for once, after the operator has started. A run
belongs to this cluster if its tags name a namespace of this cluster with its uid.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.tracking import Tracking
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.kube import Kube, KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.tracked import open_tracked
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 300.0


@dataclass
class AbandonedRuns:
    """Searches the chart's MLflow server. Runs on the servers that single jobs name cannot be found without these jobs."""

    kube: Kube
    settings: Settings
    namespaces: NamespaceReader

    async def run(self) -> None:
        """Close the runs of deleted jobs, once; retry while a server is unavailable."""
        while True:
            try:
                await self.close()
            except (ExternalError, KubeError) as error:
                log.info("cannot search for the MLflow runs of deleted jobs: %s; retrying", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            return

    async def close(self) -> None:
        """Close every open run whose job no longer exists.

        Raises:
            ExternalError: MLflow cannot be reached, or refuses.
            KubeError: the API server cannot be reached, or refuses.
        """
        tracked = await asyncio.to_thread(open_tracked, self.settings, Tracking(), None)
        if tracked is None:
            return
        for run in await asyncio.to_thread(tracked.server.find_open_runs, contract.TAG_NAMESPACE_UID):
            if await self._is_abandoned(run):
                await asyncio.to_thread(tracked.server.finish_run, run.run_id, "KILLED")
                log.info("%s was deleted: closed its MLflow run %s", run.tags[contract.TAG_JOB], run.run_id)

    async def _is_abandoned(self, run: Run) -> bool:
        """Whether a run belongs to a namespace that this operator watches, and its job no longer exists."""
        namespace, _, name = run.tags.get(contract.TAG_JOB, "").partition("/")
        is_watched = not self.settings.namespaces or namespace in self.settings.namespaces
        if not (namespace and name and is_watched):
            return False
        if await self.namespaces.read_uid(namespace) != run.tags[contract.TAG_NAMESPACE_UID]:
            return False
        body = await self.kube.get("FineTuneJob", namespace, name)
        return body is None or body["metadata"]["uid"] != run.tags.get(contract.TAG_JOB_UID)
