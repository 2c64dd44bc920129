"""The summary of a FineTuneJob: Ready once it has succeeded, Reconciling until then.

Stalled: it has failed, or waits for a change of its spec. What waits for anything else is Reconciling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, Phase
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.policy.ready import Readiness, summarize

# For each phase: the conditions that explain it, the most specific first.
_EXPLANATIONS: dict[Phase, tuple[ConditionType, ...]] = {
    "Failed": (ConditionType.FAILED,),
    "Succeeded": (ConditionType.SUCCEEDED,),
    "Suspended": (ConditionType.SUSPENDED,),
    "Registering": (ConditionType.REGISTERED, ConditionType.TRAINED),
    "Evaluating": (ConditionType.EVALUATED,),
    "Training": (ConditionType.TRAINED,),
    "Starting": (ConditionType.TRAINED,),
    "Preparing": (ConditionType.PREPARED,),
    "Pending": (ConditionType.TRAINED, ConditionType.PREPARED, ConditionType.ACCEPTED),
}
_COMPANIONS: dict[Phase, tuple[ConditionType, ...]] = {
    "Succeeded": (ConditionType.FINISHED,),
    "Failed": (ConditionType.STALLED, ConditionType.FINISHED),
}
_SETTLED: tuple[Phase, ...] = ("Failed", "Succeeded", "Suspended")
OBSTACLES = (
    ConditionType.ACCEPTED,
    ConditionType.CODE_RESOLVED,
    ConditionType.PODS_ADMITTED,
    ConditionType.MODELS_FOUND,
    ConditionType.CHECKPOINT_FOUND,
    ConditionType.PODS_HEALTHY,
)
"""Conditions that, while they do not hold, explain more than the phase that they delay: the first of them."""
# Reasons of obstacles that only a change of the spec removes.
_SPEC_CHANGE_REASONS: tuple[str, ...] = (ConditionReason.INVALID_SPEC, ConditionReason.POD_TEMPLATE_INVALID)


def summarize_status(ftj: FineTuneJob, status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """The status with what follows from its conditions: the phase, the summary, and the generation they are about."""
    conditions = status.conditions
    return summarize(
        status, assess_readiness(conditions), phase(conditions), now=now, generation=ftj.generation
    )


def assess_readiness(conditions: Sequence[Condition]) -> Readiness:
    """What the summary says, from the other conditions alone. Every reconcile sets one of them before."""
    word = phase(conditions)
    explanation = next(_explanations(word, {item.type: item for item in conditions}))
    also = _COMPANIONS.get(word, (ConditionType.RECONCILING,))
    if _needs_spec_change(word, explanation):
        also = (ConditionType.STALLED,)
    return Readiness(word == "Succeeded", also, explanation.reason, explanation.message)


def _needs_spec_change(word: Phase, explanation: Condition) -> bool:
    """Whether the job cannot make progress until its spec changes. A running preparation is progress."""
    return (
        word in ("Pending", "Starting", "Evaluating")
        and explanation.type in OBSTACLES
        and explanation.reason in _SPEC_CHANGE_REASONS
    )


def _explanations(word: Phase, by_type: dict[str, Condition]) -> Iterator[Condition]:
    if word not in _SETTLED:
        yield from (
            by_type[kind] for kind in OBSTACLES if kind in by_type and _is_obstacle(word, by_type[kind])
        )
    yield from (by_type[kind] for kind in _EXPLANATIONS[word] if kind in by_type)
    yield from by_type.values()


def _is_obstacle(word: Phase, item: Condition) -> bool:
    """Whether a condition does not hold; pods that no dry run has checked delay a job only before it starts."""
    if item.type == ConditionType.PODS_ADMITTED and item.status == "Unknown":
        return word == "Pending" and item.reason == ConditionReason.CHECK_FAILED
    return item.status != "True"
