"""The reasons why the API server refuses to create pods of a FineTuneJob's Jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from finetune_crds.base import Json
from finetune_operator.batch.rejections import read_rejection
from finetune_operator.finetunejob.children import pods_of_job
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.kube import Kube


async def read_rejections(
    kube: Kube, ftj: FineTuneJob, jobs: Mapping[str, Json], pods: Sequence[Json], now: datetime
) -> dict[str, str]:
    """The API server's last refusal to create pods, by name of the Job that lacks pods."""
    rejections: dict[str, str] = {}
    for name, job in jobs.items():

        def count_pods(job: Json = job) -> int:
            return len(pods_of_job(pods, job))

        rejection = await read_rejection(kube, ftj.key, job, count_pods, now)
        if rejection is not None:
            rejections[name] = rejection
    return rejections
