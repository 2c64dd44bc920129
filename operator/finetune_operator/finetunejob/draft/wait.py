"""Waits and refusals of a job before the operator creates its children."""

from __future__ import annotations

from typing import NamedTuple

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.result import Outcome, Stop

POLL_SECONDS = 15.0  # until the next pass checks a server or another object again
SOON_SECONDS = 0.1  # until a next pass that only needs the status of this pass


class Wait(NamedTuple):
    """The reason why a job cannot continue yet."""

    reason: ConditionReason
    message: str


class Refusal(NamedTuple):
    """The reason why a job can never continue."""

    reason: ConditionReason
    message: str


def refuse(draft: Draft, kind: ConditionType, why: Refusal) -> Outcome:
    """Set a condition to False, and fail the job."""
    draft.set(kind, False, *why)
    draft.fail(*why)
    return Stop


def wait(draft: Draft, kind: ConditionType, why: Wait) -> Outcome:
    """Set a condition to False, and end the pass; a later pass checks again."""
    draft.set(kind, False, *why)
    draft.requeue_after(max(POLL_SECONDS, draft.settings.poll_seconds))
    return Stop
