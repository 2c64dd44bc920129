"""What a write to MLflow or Databricks that failed means for the status."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide.ready import summarize_status
from finetune_operator.finetunejob.model import (
    Action,
    CancelRun,
    Decision,
    FineTuneJob,
    LogMetrics,
    SetAlias,
    SubmitRun,
    TagVersion,
)
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.policy.status import with_condition


def record_failed_action(
    ftj: FineTuneJob, decision: Decision, action: Action, problem: Problem, *, now: datetime
) -> Decision:
    """The decision, whose status now says which write failed and why."""
    kind, reason, message = ConditionType.TRACKED, problem.reason, problem.message
    if isinstance(action, SetAlias):
        kind, reason = ConditionType.REGISTERED, ConditionReason.REGISTERING
        message = f"alias {action.alias} of {action.model} cannot be set: {problem.message}"
    if isinstance(action, TagVersion | LogMetrics):
        kind = ConditionType.EVALUATED
        message = f"the metrics of the evaluation cannot be written: {problem.message}"
    if isinstance(action, SubmitRun | CancelRun):
        kind = ConditionType.PREPARED
    status = with_condition(decision.status, kind, False, reason, message, now=now, generation=ftj.generation)
    if isinstance(action, SubmitRun) and reason == ConditionReason.RUN_REFUSED:
        # What the workspace takes for invalid stays so: the compute of a job cannot change.
        failed = ConditionType.FAILED
        status = with_condition(status, failed, True, reason, message, now=now, generation=ftj.generation)
        status = backends.record_refusal(status)
        status = status.model_copy(update={"completion_time": now.replace(microsecond=0)})
    return dataclasses.replace(decision, status=summarize_status(ftj, status, now))
