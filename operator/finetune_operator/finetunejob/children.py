"""What the batch Jobs and pods of a FineTuneJob say of themselves."""

from __future__ import annotations

from collections.abc import Iterable

from finetune_crds.base import Json
from finetune_operator import names

_INDEX = "batch.kubernetes.io/job-completion-index"


def job_condition(child: Json, kind: str) -> Json | None:
    """A condition of a batch Job that is True, or None."""
    for item in child.get("status", {}).get("conditions") or []:
        if item.get("type") == kind and item.get("status") == "True":
            return dict(item)
    return None


def job_ended(child: Json) -> bool:
    """Whether a batch Job is complete or failed."""
    return job_condition(child, "Complete") is not None or job_condition(child, "Failed") is not None


def of_job(pods: Iterable[Json], child: Json) -> list[Json]:
    """The pods of one child Job, by completion index.

    Told apart by the Job's uid: pods of an earlier Job of the same name may still be stopping.
    """
    uid = child["metadata"]["uid"]
    mine = [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_CONTROLLER) == uid]
    return sorted(mine, key=lambda pod: (node_rank(pod) or 0, pod["metadata"]["name"]))


def node_rank(pod: Json) -> int | None:
    """The completion index of a pod of an Indexed Job, which is its node rank."""
    index = pod["metadata"].get("annotations", {}).get(_INDEX)
    return int(index) if index is not None else None
