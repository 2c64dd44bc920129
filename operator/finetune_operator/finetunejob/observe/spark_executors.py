"""Reads the Spark executors of a preparation: pods whose owner is the driver's pod, not a Job."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionType
from finetune_operator import names
from finetune_operator.batch.state import is_alive
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.preparation import driver_pod, executors
from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

_REFUSAL_STATUSES = (400, 403, 422)


class Executors(NamedTuple):
    """The executors of a job, and why the API server refuses to create the missing ones, if it does."""

    pods: tuple[Json, ...] = ()
    refusal: str | None = None


@dataclass(frozen=True)
class ExecutorReader:
    """Lists the executors of one job at a time, while its driver runs."""

    kube: Kube
    settings: Settings

    async def read(self, ftj: FineTuneJob, pods: Sequence[Json], now: datetime) -> Executors:
        """The executors of a running preparation; empty for any other job, or if they cannot be listed."""
        if ftj.spec is None or not executors.count_executors(ftj.spec) or ftj.holds(ConditionType.PREPARED):
            return Executors()
        drivers = [pod for pod in pods if _is_driver(pod) and is_alive(pod)]
        if not drivers:
            return Executors()
        try:
            listed = await self.kube.list("Pod", ftj.namespace, labelSelector=executors.build_selector(ftj))
        except KubeError as error:
            log.warning("%s: cannot list its executors: %s", ftj.key, error)
            return Executors()
        executor_pods = executors.select_executors(listed.objects, drivers)
        shortage = executors.count_missing(ftj, drivers, executor_pods, now)
        refusal = await self._find_refusal(ftj, shortage) if shortage else None
        return Executors(tuple(executor_pods), refusal)

    async def _find_refusal(self, ftj: FineTuneJob, shortage: executors.MissingExecutors) -> str | None:
        """Explain, from a dry run, why the API server refuses executors; None if the dry run does not show it.

        Spark creates the executors, so no Event records the refusal.
        """
        try:
            await self.kube.create(driver_pod.build_executor_trial(ftj, self.settings), dry_run=True)
        except KubeError as error:
            if error.status in _REFUSAL_STATUSES:
                return f"{shortage.missing} of {shortage.desired} executors cannot be created: {error}"
            log.warning("%s: the dry run of its executors failed: %s", ftj.key, error)
        return None


def _is_driver(pod: Json) -> bool:
    return (pod["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT) == names.PREP
