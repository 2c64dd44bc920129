"""What a write to MLflow that failed means for the status."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import Reason, Type
from finetune_operator.decide.draft import Draft
from finetune_operator.model import Action, Decision, Job, MlflowProblem, Observed, SetAlias
from finetune_operator.settings import Settings


def undone(
    job: Job,
    decision: Decision,
    action: Action,
    problem: MlflowProblem,
    *,
    now: datetime,
    settings: Settings,
) -> Decision:
    """The decision, whose status now says which write failed and why."""
    draft = Draft(
        dataclasses.replace(job, status=decision.status), Observed(), now.replace(microsecond=0), settings
    )
    if isinstance(action, SetAlias):
        message = f"alias {action.alias} of {action.model} cannot be set: {problem.message}"
        draft.set(Type.REGISTERED, False, Reason.REGISTERING, message)
    else:
        draft.set(Type.TRACKED, False, problem.reason, problem.message)
    return dataclasses.replace(decision, status=draft.status)
