"""Records a created MLflow run in the status.

NB: MLflow does not always find a new run immediately. Without the run's id in the status, every pass would create another run.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus
from finetune_operator.finetunejob.decide import links
from finetune_operator.finetunejob.decide.ready import summarize_status
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.mlflow.model import Run
from finetune_operator.policy.status import with_condition
from finetune_operator.settings import Settings


def record_run(
    ftj: FineTuneJob, decision: Decision, run: Run, server: str, settings: Settings, *, now: datetime
) -> Decision:
    """Return the decision with the run in its status.

    Args:
        server: address of the MLflow server.
    """
    if ftj.spec is None:
        return decision
    page = links.run_page(settings, ftj.spec.tracking, run.experiment_id, run.run_id, server)
    mlflow = MlflowStatus(experiment_id=run.experiment_id, run_id=run.run_id, url=page)
    status = decision.status.model_copy(update={"mlflow": mlflow})
    before = ftj.status.run_id
    reason, message = ConditionReason.RUN_READY, f"MLflow run {run.run_id}"
    if before not in (None, run.run_id):
        reason, message = ConditionReason.RUN_REPLACED, f"MLflow run {run.run_id} replaces run {before}"
    status = with_condition(
        status, ConditionType.TRACKED, True, reason, message, now=now, generation=ftj.generation
    )
    return dataclasses.replace(decision, status=summarize_status(ftj, status, now))
