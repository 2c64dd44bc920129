"""Reads the Jobs of promotions: from the cache and, once they have ended, their pods and MLflow runs from the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.batch.rejections import read_rejection
from finetune_operator.batch.state import has_ended
from finetune_operator.controller.store import Store
from finetune_operator.kube import Kube
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.modelpromotion.model import ObservedJob, Promotion, find_run_id
from finetune_operator.owners import Owner, find_owner

# Logs in to the MLflow server of a promotion; None without a server.
OpenServer = Callable[[Promotion], Awaitable[Server | None]]


@dataclass
class JobReader:
    """The Jobs of the gates and copies of promotions."""

    kube: Kube
    store: Store
    now: Callable[[], datetime]

    def find(self, promotion: Promotion) -> tuple[ObservedJob, ...]:
        """The Jobs with their pods, from the cache."""
        owner = Owner(promotion.namespace, promotion.uid)
        jobs = self.store.jobs_of(owner)
        pods = self.store.pods_of(owner) if jobs else []
        return tuple(ObservedJob(job, tuple(pod for pod in pods if _is_pod_of(job, pod))) for job in jobs)

    async def read(
        self, promotion: Promotion, jobs: tuple[ObservedJob, ...], open_server: OpenServer
    ) -> tuple[ObservedJob, ...]:
        """The Jobs with what only servers know: pods and runs of those whose result is not recorded, and why others lack pods.

        Raises:
            ExternalError: MLflow cannot be reached, or refuses.
            KubeError: the API server could not be reached.
        """
        recorded_names = {result.job for result in promotion.status.gate_results}
        return tuple(
            [
                job
                # A released copy was made, or is not needed any more.
                if job.name in recorded_names or (job.component == names.COPY and job.is_released)
                else await self._complete(promotion, job, open_server)
                for job in jobs
            ]
        )

    async def _complete(self, promotion: Promotion, job: ObservedJob, open_server: OpenServer) -> ObservedJob:
        if not has_ended(job.body):
            rejection = await read_rejection(
                self.kube, promotion.key, job.body, lambda: len(job.pods), self.now()
            )
            return replace(job, rejection=rejection)
        # NB: Jobs and pods come from two watches, and the end of a Job may arrive before the ends of its pods.
        selector = f"{names.LABEL_CONTROLLER}={job.uid}"
        listed = await self.kube.list("Pod", promotion.namespace, labelSelector=selector)
        pods = tuple(pod for pod in listed.objects if _is_pod_of(job.body, pod))
        return replace(job, pods=pods, run=await _read_run(promotion, job.body, open_server))


def _is_pod_of(job: Json, pod: Json) -> bool:
    meta = job["metadata"]
    return find_owner("Pod", pod) == Owner(meta["namespace"], meta["uid"])


async def _read_run(promotion: Promotion, job: Json, open_server: OpenServer) -> Run | None:
    """The MLflow run of a Job; None if it has none, or if somebody deleted it."""
    run_id = find_run_id(job)
    server = await open_server(promotion) if run_id else None
    return await asyncio.to_thread(server.read_run, run_id) if server and run_id else None
