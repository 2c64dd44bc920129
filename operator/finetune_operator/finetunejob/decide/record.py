"""The uids of the current Jobs, which identify pods that outlive their Job.

A user may delete a Job and leave its pods to the garbage collector, and a lost node keeps its pods. If the operator restarts after that,
only the uids in the status tell it that these pods belong to the job and may still write to its folders.
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
    current = {
        "prep": names.prep_name(name),
        "train": names.train_name(name, attempt),
        "evaluate": names.evaluate_name(name),
    }
    recorded = {part: jobs[job]["metadata"]["uid"] for part, job in current.items() if job in jobs}
    if "train" in recorded:
        recorded["train_attempt"] = attempt
    if recorded:
        draft.update(jobs=(draft.status.jobs or JobUids()).model_copy(update=recorded))
    return Continue
