"""The results of writes to MLflow and Databricks, recorded in the status."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from finetune_operator.finetunejob.decide.created_run import record_run
from finetune_operator.finetunejob.decide.failed_action import record_failed_action
from finetune_operator.finetunejob.decision import ActionResult, DatabricksAction, Decision
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.settings import Settings


def record_results(
    ftj: FineTuneJob,
    decision: Decision,
    results: Iterable[ActionResult],
    settings: Settings,
    *,
    now: datetime,
) -> Decision:
    """Return the decision with the results of its actions in the status."""
    for result in results:
        if result.pending_seconds is not None:
            continue
        if result.problem:
            decision = record_failed_action(ftj, decision, result.action, result.problem, now=now)
        elif isinstance(result.action, DatabricksAction):
            decision = backends.record_run(decision, result.databricks_run_id)
        elif result.run:
            decision = record_run(ftj, decision, result.run, result.server, settings, now=now)
    return decision
