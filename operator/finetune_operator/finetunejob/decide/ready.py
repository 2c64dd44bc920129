"""The summary of a FineTuneJob: Ready once it has succeeded, Stalled when it has failed, Reconciling until then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, Phase
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.policy.ready import Progress, Readiness
from finetune_operator.policy.ready import summarized as summarize
from finetune_operator.policy.status import with_condition

# For each phase: the conditions that explain it, the most specific first.
_EXPLAINS: dict[Phase, tuple[ConditionType, ...]] = {
    "Failed": (ConditionType.FAILED,),
    "Succeeded": (ConditionType.SUCCEEDED,),
    "Suspended": (ConditionType.SUSPENDED,),
    "Registering": (ConditionType.REGISTERED, ConditionType.TRAINED),
    "Training": (ConditionType.TRAINED,),
    "Starting": (ConditionType.TRAINED,),
    "Preparing": (ConditionType.PREPARED,),
    "Pending": (ConditionType.TRAINED, ConditionType.PREPARED, ConditionType.ACCEPTED),
}
_PROGRESS: dict[Phase, Progress | None] = {"Succeeded": None, "Failed": ConditionType.STALLED}
_ENDS = (ConditionType.SUCCEEDED, ConditionType.FAILED)
_SETTLED: tuple[Phase, ...] = ("Failed", "Succeeded", "Suspended")
# Conditions that, while they do not hold, explain more than the phase that they delay.
_OBSTACLES = (ConditionType.ACCEPTED, ConditionType.PODS_HEALTHY)


def summarized(ftj: FineTuneJob, status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """The status with what follows from its conditions: the phase, the summary, and the generation they are about."""
    conditions = status.conditions
    end = next((item for item in conditions if item.type in _ENDS and item.status == "True"), None)
    if end is not None:
        conditions = with_condition(
            conditions,
            ConditionType.FINISHED,
            True,
            end.reason,
            end.message,
            now=now,
            generation=ftj.generation,
        )
        status = status.model_copy(update={"conditions": conditions})
    return summarize(status, ready(conditions), phase(conditions), now=now, generation=ftj.generation)


def restated(
    ftj: FineTuneJob,
    status: FineTuneJobStatus,
    kind: ConditionType,
    reason: ConditionReason,
    message: str,
    *,
    holds: bool | None = False,
    now: datetime,
) -> FineTuneJobStatus:
    """The status of a decision after one more condition is set, because the decision could not be carried out."""
    now = now.replace(microsecond=0)
    conditions = with_condition(
        status.conditions, kind, holds, reason, message, now=now, generation=ftj.generation
    )
    return summarized(ftj, status.model_copy(update={"conditions": conditions}), now)


def ready(conditions: Sequence[Condition]) -> Readiness:
    """What the summary says, from the other conditions alone. Every reconcile sets one of them before."""
    word = phase(conditions)
    explanation = next(_explanations(word, {item.type: item for item in conditions}))
    progress = _PROGRESS.get(word, ConditionType.RECONCILING)
    return Readiness(word == "Succeeded", progress, explanation.reason, explanation.message)


def _explanations(word: Phase, known: dict[str, Condition]) -> Iterator[Condition]:
    if word not in _SETTLED:
        yield from (known[kind] for kind in _OBSTACLES if kind in known and known[kind].status != "True")
    yield from (known[kind] for kind in _EXPLAINS[word] if kind in known)
    yield from known.values()
