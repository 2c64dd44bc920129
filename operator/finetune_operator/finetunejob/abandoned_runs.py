"""Closes the MLflow runs of deleted jobs: when a job is deleted, and of jobs that were deleted while the operator was down.

A watch does not deliver what happened before it began, so the runs are searched for once, after the operator has started. A run is of
this cluster if its tags contain the name and the uid of a namespace of this cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason
from finetune_crds.tracking import Tracking
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.model import FineTuneJob, find_run_status, has_open_run
from finetune_operator.finetunejob.observe.namespaces import NamespaceReader
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.kube import Kube, KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.tracked import Tracked, open_tracked
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

_FIRST_DELAY_SECONDS = 60.0
_MAX_DELAY_SECONDS = 3600.0


@dataclass
class AbandonedRuns:
    """Closes the runs of deleted jobs on the MLflow server that the chart configures.

    The run of a job with its own MLflow server or login stays open: this server or login is unknown once the job is deleted.

    Attributes:
        sleep: waits for a number of seconds.
    """

    kube: Kube
    store: Store
    settings: Settings
    namespaces: NamespaceReader
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self) -> None:
        """Close the runs of deleted jobs, once. While MLflow is unavailable, the search is repeated, with growing delays."""
        delay = _FIRST_DELAY_SECONDS
        while True:
            try:
                await self.close()
            except ExternalError as error:
                # The chart's login is wrong: a retry with it would fail too.
                if error.problem.reason == ConditionReason.MLFLOW_FORBIDDEN:
                    log.warning("cannot search for the MLflow runs of deleted jobs: %s", error)
                    return
                log.info("cannot search for the MLflow runs of deleted jobs: %s; retrying", error)
                await self.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY_SECONDS)
            else:
                return

    async def close(self) -> None:
        """Close every open run whose job no longer exists; without an MLflow server in the chart, do nothing.

        A run that cannot be closed stays open.

        Raises:
            ExternalError: MLflow cannot be searched.
        """
        tracked = await asyncio.to_thread(open_tracked, self.settings, Tracking(), None)
        if tracked is None:
            return
        for run in await asyncio.to_thread(tracked.server.find_open_runs, contract.TAG_NAMESPACE_UID):
            job = run.tags.get(contract.TAG_JOB, "")
            try:
                if await self._is_abandoned(run, job):
                    await asyncio.to_thread(tracked.server.finish_run, run.run_id, "KILLED")
                    log.info("%s was deleted: closed its MLflow run %s", job, run.run_id)
            except (ExternalError, KubeError) as error:
                log.warning("MLflow run %s of %s stays open: %s", run.run_id, job, error)

    async def _is_abandoned(self, run: Run, job: str) -> bool:
        """Whether a run belongs to a namespace that this operator watches, and its job no longer exists."""
        namespace, _, name = job.partition("/")
        # An operator without a list of namespaces watches all of them.
        is_watched = not self.settings.namespaces or namespace in self.settings.namespaces
        is_job_key = bool(namespace and name) and "/" not in name
        if not is_job_key or not is_watched:
            return False
        if await self.namespaces.read_uid(namespace) != run.tags.get(contract.TAG_NAMESPACE_UID):
            return False
        uid = run.tags.get(contract.TAG_JOB_UID)
        cached = self.store.finetunejobs.get((namespace, name))
        if cached and cached["metadata"]["uid"] == uid:
            return False
        # NB: the store may be behind, and a run that is closed by mistake is lost, so the API server is asked as well.
        body = await self.kube.get("FineTuneJob", namespace, name)
        return body is None or body["metadata"]["uid"] != uid


async def close_run_of_deleted(observer: FineTuneJobObserver, ftj: FineTuneJob) -> None:
    """Close the MLflow run of a job that was deleted, if it is still open. If this fails, `AbandonedRuns` tries again at the next start.

    NB: a job may be deleted after its run was created and before a status named the run. The run is then found by the job's uid. A run that
    is still being created is closed by `RunCreator`.
    """
    was_requested = observer.run_creator.forget(ftj)
    run_id = ftj.status.run_id
    if not has_open_run(ftj.status) and (run_id is not None or not was_requested):
        return
    try:
        tracked = await observer.poller.tracked(ftj)
        if tracked:
            # NB: people delete many jobs at once. Without turns, a slow server would occupy the threads that passes need.
            async with observer.poller.turn(ftj, tracked):
                run_id = run_id or await asyncio.to_thread(_find_open_run, tracked, ftj)
                if run_id is None:
                    return
                await asyncio.to_thread(tracked.server.finish_run, run_id, find_run_status(ftj.status))
            log.info("%s was deleted: closed its MLflow run %s", ftj.key, run_id)
    except (ExternalError, KubeError) as error:
        run = f"its MLflow run {run_id}" if run_id else "an MLflow run that its status does not name"
        log.warning("%s was deleted; %s stays open until the operator starts again: %s", ftj.key, run, error)


def _find_open_run(tracked: Tracked, ftj: FineTuneJob) -> str | None:
    """The id of a job's run, found by the job's uid; None if there is none, or it was closed. The call blocks."""
    tracking = ftj.spec.tracking if ftj.spec else Tracking()
    experiment = names.experiment(ftj.namespace, tracking, on_databricks=tracked.workspace is not None)
    run = tracked.server.find_run(ftj.uid, experiment)
    return run.run_id if run and run.status == "RUNNING" else None
