"""What a write to MLflow that failed means for the status."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.finetunejob.decide.ready import summarized
from finetune_operator.finetunejob.model import Action, Decision, FineTuneJob, Observed, SetAlias
from finetune_operator.settings import Settings


def failed_action(
    ftj: FineTuneJob,
    decision: Decision,
    action: Action,
    problem: Problem,
    *,
    now: datetime,
    settings: Settings,
) -> Decision:
    """The decision, whose status now says which write failed and why."""
    draft = Draft(
        dataclasses.replace(ftj, status=decision.status), Observed(), now.replace(microsecond=0), settings
    )
    if isinstance(action, SetAlias):
        message = f"alias {action.alias} of {action.model} cannot be set: {problem.message}"
        draft.set(ConditionType.REGISTERED, False, ConditionReason.REGISTERING, message)
    else:
        draft.set(ConditionType.TRACKED, False, problem.reason, problem.message)
    return dataclasses.replace(decision, status=summarized(ftj, draft.status, draft.now))
