"""Which jobs need no pass until an object in the store changes.

A pass over a job reads the store and, depending on how far the job is, servers and objects that no watch reports. A change wakes the job
as follows:

- The job, its Jobs, pods, Services and ConfigMaps: a watch reports the change. The periodic list finds what a watch missed.
- MLflow (progress, the end of a run, a version), a Databricks run, the registry of an alias, a Git server, a SparkApplication and its pods,
  Spark executors, a Workload of Kueue, the Lease of a preparation, the job whose checkpoints this job waits for, a Secret, a node, Events:
  no watch reports the change. Policies request the next pass with `requeue_after`, and it comes after the resync interval at the latest.
- Time (a deadline, backoff, a lost pod, the TTL): policies request a pass for that time.

A finished job reads only what its cleanup needs. When the cleanup is complete, only the store and the TTL remain.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune_crds.base import Json
from finetune_operator.batch.state import has_ended, is_alive
from finetune_operator.finetunejob.model import FineTuneJob, has_open_run
from finetune_operator.finetunejob.preparation import backends

LONGEST_WAIT_SECONDS = 600.0
"""How long a quiet job waits for its next pass, which comes in case a watch and a list missed a change.

NB: not a number of resync intervals. A short interval is for what no watch reports, such as a moved alias, and would cause passes over all
finished jobs; a long interval would become days.
"""


def is_quiet(ftj: FineTuneJob, jobs: Iterable[Json], pods: Iterable[Json]) -> bool:
    """Whether a job has finished and its cleanup is complete: its children have ended, and no run outside the cluster is open.

    Args:
        jobs: the Jobs of the FineTuneJob.
        pods: the pods of these Jobs.
    """
    return (
        ftj.is_finished
        and not ftj.deleting
        # A Databricks run may exist while the finalizer does.
        and not ftj.finalizers
        and not has_open_run(ftj.status)
        and backends.find_kind_to_read(ftj) is None
        and all(map(has_ended, jobs))
        and not any(map(is_alive, pods))
    )
