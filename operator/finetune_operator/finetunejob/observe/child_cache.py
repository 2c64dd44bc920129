"""A FineTuneJob's children: from the cache or, if two watches may disagree, from the API server."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionType
from finetune_operator import names
from finetune_operator.batch.state import has_ended
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.kube import Kube
from finetune_operator.owners import Owner


@dataclass
class ChildCache:
    """The children of FineTuneJobs."""

    kube: Kube
    store: Store

    async def jobs_and_pods(self, ftj: FineTuneJob) -> tuple[dict[str, Json], list[Json]]:
        """The Jobs by name, and the pods that exist.

        Raises:
            KubeError: the pods of a Job that ended could not be listed.
        """
        owner = Owner(ftj.namespace, ftj.uid)
        jobs = {job["metadata"]["name"]: job for job in self.store.jobs_of(owner)}
        await self._read_ends(ftj, jobs)
        return jobs, self.store.pods_of(owner)

    def companions(self, ftj: FineTuneJob) -> frozenset[tuple[str, str]]:
        """Kind and name of each Service, ConfigMap and NetworkPolicy of the job."""
        return self.store.companions_of(Owner(ftj.namespace, ftj.uid))

    def failed_pods(self, ftj: FineTuneJob) -> list[Json]:
        """Pods that ended and no longer exist, each in its last state."""
        return self.store.tombstones(Owner(ftj.namespace, ftj.uid))

    async def _read_ends(self, ftj: FineTuneJob, jobs: dict[str, Json]) -> None:
        """List the pods of each ended Job whose end is not yet in the status.

        NB: Jobs and pods come from two watches, and the end of a Job may arrive before the ends of its pods. Without
        this read, the Job's result would seem lost, or its failure would have no known cause.
        """
        for name, job in jobs.items():
            if has_ended(job) and _is_unread(ftj, name):
                selector = f"{names.LABEL_CONTROLLER}={job['metadata']['uid']}"
                for body in (await self.kube.list("Pod", ftj.namespace, labelSelector=selector)).objects:
                    self.store.put("Pod", body)


def _is_unread(ftj: FineTuneJob, name: str) -> bool:
    """Whether the status does not yet record how the Job of this name ended."""
    if ftj.is_finished:
        return False
    if name == names.prep_name(ftj.name):
        return not ftj.holds(ConditionType.PREPARED)
    if name == names.evaluate_name(ftj.name):
        return ftj.status.evaluation is None
    current = names.train_name(ftj.name, ftj.status.attempt or 1)
    return name == current and not ftj.holds(ConditionType.TRAINED)
