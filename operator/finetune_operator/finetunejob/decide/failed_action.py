"""Records a failed write to MLflow or Databricks in the status."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide.ready import summarize_status
from finetune_operator.finetunejob.decision import (
    Action,
    CancelRun,
    Decision,
    EnsureRun,
    FinishRun,
    LogMetrics,
    SetAlias,
    SubmitRun,
    TagVersion,
)
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.policy.status import with_condition


def record_failed_action(
    ftj: FineTuneJob, decision: Decision, action: Action, problem: Problem, *, now: datetime
) -> Decision:
    """Return the decision with the failed write and its cause in the status."""
    kind, reason, message = _explain_failure(action, problem)
    status = with_condition(decision.status, kind, False, reason, message, now=now, generation=ftj.generation)
    if isinstance(action, SubmitRun) and reason == ConditionReason.RUN_REFUSED:
        # The workspace would refuse the run again: the compute of a job cannot change.
        failed = ConditionType.FAILED
        status = with_condition(status, failed, True, reason, message, now=now, generation=ftj.generation)
        status = backends.record_refusal(status)
        status = status.model_copy(update={"completion_time": now.replace(microsecond=0)})
    return dataclasses.replace(decision, status=summarize_status(ftj, status, now))


def _explain_failure(action: Action, problem: Problem) -> tuple[ConditionType, ConditionReason, str]:
    """The condition that the failure of an action makes false, with its reason and its message."""
    match action:
        case SetAlias():
            message = f"alias {action.alias} of {action.model} cannot be set: {problem.message}"
            return ConditionType.REGISTERED, ConditionReason.REGISTERING, message
        case TagVersion() | LogMetrics():
            message = f"the metrics of the evaluation cannot be written: {problem.message}"
            return ConditionType.EVALUATED, problem.reason, message
        case SubmitRun() | CancelRun():
            return ConditionType.PREPARED, problem.reason, problem.message
        case EnsureRun() | FinishRun():
            return ConditionType.TRACKED, problem.reason, problem.message
