"""Writes to the Jobs of a promotion and to their MLflow runs. Every write may be repeated."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator.batch.state import has_ended
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import Kube, KubeError
from finetune_operator.modelpromotion.model import (
    CloseRun,
    JobAction,
    JobRun,
    Promotion,
    ReleaseJob,
    StartJob,
    StopJob,
    find_run_id,
)
from finetune_operator.modelpromotion.observe import ModelPromotionObserver
from finetune_operator.modelpromotion.pods.job import add_run
from finetune_operator.owners import Owner, find_resource

log = logging.getLogger(__name__)

# How long a Job is kept after its result is in the status, for its log.
_KEPT_SECONDS = 24 * 3600
# The API server refuses the Job: its template, a quota, a policy.
_REFUSALS = (400, 403, 422)


@dataclass
class JobApplier:
    """Carries out the actions for the Jobs of gates and copies."""

    kube: Kube
    store: Store
    observer: ModelPromotionObserver

    async def act(self, promotion: Promotion, action: JobAction) -> None:
        """Carry out an action.

        Raises:
            ExternalError: the API server refuses the Job, or MLflow refuses its run or cannot be reached.
            KubeError: the API server could not be reached.
        """
        match action:
            case StartJob():
                await self._start(promotion, action)
            case StopJob():
                # First the run: without the Job, an interrupted pass would not know it any more.
                await self._close_stopped_run(promotion, action.run_id)
                # NB: with foreground deletion, the Job stays until its pods are deleted, so that no two Jobs of one name run at once.
                await self.kube.delete("Job", promotion.namespace, action.name, action.uid, foreground=True)
                log.info("%s: stopped Job %s", promotion.key, action.name)
            case ReleaseJob():
                await self._release(promotion, action)
            case CloseRun():
                await self._close_run(promotion, action.run_id, action.status)

    async def close_runs_of_deleted(self, promotion: Promotion) -> None:
        """Close the MLflow runs of the Jobs that ran when their promotion was deleted. Kubernetes deletes the Jobs."""
        for job in self.store.jobs_of(Owner(promotion.namespace, promotion.uid)):
            if not has_ended(job):
                await self._close_stopped_run(promotion, find_run_id(job))

    async def _close_stopped_run(self, promotion: Promotion, run_id: str | None) -> None:
        """Close the run of a Job that is stopped, if MLflow lets the operator: the Job is stopped in any case."""
        if run_id is None:
            return
        try:
            await self._close_run(promotion, run_id, "KILLED")
        except (ExternalError, KubeError) as error:
            log.warning("%s: MLflow run %s of a stopped Job stays open: %s", promotion.key, run_id, error)

    async def _close_run(self, promotion: Promotion, run_id: str, status: str) -> None:
        server = await self.observer.open_server(promotion)
        if server:
            await asyncio.to_thread(server.finish_run, run_id, status)

    async def _start(self, promotion: Promotion, action: StartJob) -> None:
        """Create the MLflow run and then the Job, or find what an interrupted pass has created."""
        run_id = await self._ensure_run(promotion, action.run) if action.run else None
        body = add_run(action.body, run_id) if run_id else action.body
        name = body["metadata"]["name"]
        try:
            created = await self.kube.create_or_get(body)
        except KubeError as error:
            if error.status in _REFUSALS:
                raise _build_error(f"Job {name} cannot be created: {error}") from error
            raise
        if created.is_new:
            log.info("%s: created Job %s", promotion.key, name)
        elif find_resource(created.body) != Owner(promotion.namespace, promotion.uid):
            raise _build_error(f"Job {name} exists and does not belong to this promotion: delete the Job")
        self.store.put("Job", created.body)

    async def _ensure_run(self, promotion: Promotion, run: JobRun) -> str | None:
        server = await self.observer.open_server(promotion)
        if server is None:
            return None
        found_run = await asyncio.to_thread(
            server.ensure_run, run.key, run.experiment, run.name, run.tags, tag=run.tag
        )
        return found_run.run_id

    async def _release(self, promotion: Promotion, action: ReleaseJob) -> None:
        body: Json = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": action.name, "namespace": promotion.namespace, "uid": action.uid},
            "spec": {"ttlSecondsAfterFinished": _KEPT_SECONDS},
        }
        try:
            self.store.put("Job", await self.kube.apply(body))
        except KubeError as error:
            # The Job was deleted meanwhile, or another one has its name.
            if error.status not in (404, 409):
                raise


def _build_error(message: str) -> ExternalError:
    return ExternalError(Problem(ConditionReason.GATE_NOT_STARTED, message))
