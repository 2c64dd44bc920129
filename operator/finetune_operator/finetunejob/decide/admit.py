"""Before the preparation, which may take hours, the API server judges the training pods that are to follow it.

The judgement is a dry run, made once for each generation of the spec. Where no preparation precedes, the training Job itself
is created at once, which tells the same. A quota does not stop the preparation: the pods need it only after that, when other
jobs may have returned it.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.finetunejob.decide import gang
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.finetunejob.decide.ready import summarized
from finetune_operator.finetunejob.model import Decision, FineTuneJob, Rehearsal
from finetune_operator.policy.outcome import Continue, Outcome, Stop
from finetune_operator.policy.status import with_condition


def admit(draft: Draft) -> Outcome:
    """End the pass while the training pods are unjudged or refused and the preparation has not started."""
    if draft.spec.data.prepare is None or draft.holds(ConditionType.PREPARED):
        draft.unset(ConditionType.PODS_ADMITTED)
        return Continue
    if draft.spec.suspend:
        return Continue
    judged = draft.condition(ConditionType.PODS_ADMITTED)
    if judged is None or judged.observed_generation != draft.generation:
        draft.rehearse += rehearsal(draft)
        return Continue if draft.status.start_time else Stop
    return Stop if is_refused(judged) and draft.status.start_time is None else Continue


def rehearsal(draft: Draft) -> list[Json]:
    """The training Job, and one Pod of it: a Job alone passes quotas and Pod Security."""
    job = gang.job(draft, draft.status.attempt or 1)
    template, meta = job["spec"]["template"], job["metadata"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template.get("metadata", {}),
            "name": f"{meta['name']}-0",
            "namespace": meta["namespace"],
        },
        "spec": template["spec"],
    }
    return [job, pod]


def is_refused(judged: Condition) -> bool:
    """Whether the pods cannot be created before the spec changes."""
    return judged.status == "False" and judged.reason != ConditionReason.QUOTA_EXCEEDED


def rehearsed(ftj: FineTuneJob, decision: Decision, answer: Rehearsal, *, now: datetime) -> Decision:
    """The decision, whose status now says how the dry runs ended."""
    status = with_condition(
        decision.status,
        ConditionType.PODS_ADMITTED,
        answer.admitted,
        answer.reason,
        answer.message,
        now=now.replace(microsecond=0),
        generation=ftj.generation,
    )
    return dataclasses.replace(decision, status=summarized(ftj, status, now))
