"""Before anything is created for a job, the API server judges its training pods by a dry run.

A preparation takes hours, and the pods of a Job that exists stay as they are when podTemplate is corrected. The API server is
asked once for each generation of the spec, until the data are prepared. A quota does not stop the job: the pods need it only
after the preparation, when other jobs may have returned it.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.finetunejob.decide import gang
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.finetunejob.model import Rehearsal
from finetune_operator.policy.outcome import Continue, Outcome, Stop


def admit(draft: Draft) -> Outcome:
    """End the pass until the training pods are judged, and while they are refused, unless the preparation runs already."""
    if draft.holds(ConditionType.PREPARED):
        draft.unset(ConditionType.PODS_ADMITTED)
        return Continue
    if draft.spec.suspend:
        return Continue
    judged = draft.condition(ConditionType.PODS_ADMITTED)
    if judged is None or judged.observed_generation != draft.generation:
        answer = draft.observed.rehearsal
        if answer is None:
            draft.rehearse += rehearsal(draft)
            return Stop
        judged = _record(draft, answer)
    return Stop if judged and _is_refused(judged) and draft.status.start_time is None else Continue


def rehearsal(draft: Draft) -> list[Json]:
    """One of the training pods, since a Job alone passes quotas and Pod Security; and the Job, where it comes much later."""
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
    return [job, pod] if draft.spec.data.prepare else [pod]


def _record(draft: Draft, answer: Rehearsal) -> Condition | None:
    """Write the answer into the status; without a preparation only a refusal, since the pods themselves tell the rest."""
    draft.set(ConditionType.PODS_ADMITTED, answer.admitted, answer.reason, answer.message)
    judged = draft.condition(ConditionType.PODS_ADMITTED)
    if judged and draft.spec.data.prepare is None and not _is_refused(judged):
        draft.unset(ConditionType.PODS_ADMITTED)
    return judged


def _is_refused(judged: Condition) -> bool:
    """Whether the pods cannot be created before the spec changes."""
    return judged.status == "False" and judged.reason != ConditionReason.QUOTA_EXCEEDED
