"""The uids of the current Jobs, which identify pods that outlive their Job.

A user may delete a Job and leave its pods to the garbage collector, and a lost node keeps its pods. Such pods
may still write to the job's folders. After a restart, the operator recognizes such pods only by the uids in the status.
"""

from __future__ import annotations

from finetune_crds.status import JobUids
from finetune_operator import names
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.result import Continue, Outcome


def record_jobs(draft: Draft) -> Outcome:
    """Record the Jobs of the preparation, the current attempt and the evaluation. A deleted Job stays recorded.

    NB: a Job is created only after all pods of the previous Job have ended or are lost, so one uid of each kind suffices.
    """
    jobs, name = draft.observed.jobs, draft.ftj.name
    attempt = draft.status.attempt or 1
    job_names = {
        "prep": names.prep_name(name),
        "train": names.train_name(name, attempt),
        "evaluate": names.evaluate_name(name),
    }
    recorded = {
        field: jobs[job_name]["metadata"]["uid"] for field, job_name in job_names.items() if job_name in jobs
    }
    before = draft.status.jobs or JobUids()
    if "train" in recorded:
        recorded["train_attempt"] = attempt
        # The recorded start time is that of the previous Job.
        if recorded["train"] != before.train:
            recorded["train_start_time"] = None
    if recorded:
        draft.update(jobs=before.model_copy(update=recorded))
    return Continue
