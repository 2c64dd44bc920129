"""Waits and refusals of a job before the operator creates its children."""

from __future__ import annotations

from typing import NamedTuple

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.result import Outcome, Stop

POLL_SECONDS = 15.0
SOON_SECONDS = 0.1


class Wait(NamedTuple):
    """Why a job cannot go on yet."""

    reason: ConditionReason
    message: str


class Refusal(NamedTuple):
    """Why a job can never go on."""

    reason: ConditionReason
    message: str


def refuse(draft: Draft, kind: ConditionType, why: Refusal) -> Outcome:
    """Fail the job, with a condition that does not hold."""
    draft.set(kind, False, *why)
    draft.fail(*why)
    return Stop


def wait(draft: Draft, kind: ConditionType, why: Wait) -> Outcome:
    """End the pass with a condition that does not hold; the next one looks again."""
    draft.set(kind, False, *why)
    draft.requeue_after(max(POLL_SECONDS, draft.settings.poll_seconds))
    return Stop
