"""What a write to MLflow that failed means for the status."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide.ready import summarized
from finetune_operator.finetunejob.model import Action, Decision, FineTuneJob, SetAlias
from finetune_operator.policy.status import with_condition


def failed_action(
    ftj: FineTuneJob, decision: Decision, action: Action, problem: Problem, *, now: datetime
) -> Decision:
    """The decision, whose status now says which write failed and why."""
    kind, reason, message = ConditionType.TRACKED, problem.reason, problem.message
    if isinstance(action, SetAlias):
        kind, reason = ConditionType.REGISTERED, ConditionReason.REGISTERING
        message = f"alias {action.alias} of {action.model} cannot be set: {problem.message}"
    status = with_condition(decision.status, kind, False, reason, message, now=now, generation=ftj.generation)
    return dataclasses.replace(decision, status=summarized(ftj, status, now))
