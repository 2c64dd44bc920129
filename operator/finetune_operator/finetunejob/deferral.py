"""How long the status of a pass may wait for the next pass.

A write of the status costs the API server and etcd more CPU time than all children of a job together. Two passes over a new job are followed
soon by a pass that writes the same fields again, so their statuses wait for that pass:

- the first pass, while MLflow creates the run: the next pass has the run;
- the pass that creates the Job of an attempt: the next pass has the pods.

NB: a record must be written before the thing that it names is created; otherwise a pass after a crash could not find the thing, and would
create another one. The records are the id of the MLflow run (`created_run`), the number of the next attempt (`attempt`), the values of the
chart that the job keeps (`accept`) and the pinned versions (`resolve_alias`). A status that waits delays what depends on its records too,
since the next pass decides from the status that was written.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune_crds.conditions import ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.decision import ActionResult, Decision, EnsureRun

_MAX_WAIT_FOR_RUN_SECONDS = 5.0
_MAX_WAIT_FOR_PODS_SECONDS = 1.0
# The fields that the next pass derives again from the Job of an attempt.
_DERIVED_FIELDS = frozenset({"attempt", "restarts", "start_time", "nodes", "links", "conditions"})
# Conditions that are False in each status of a new job. Any other condition that is False reports a problem, which must not wait.
_FALSE_AT_FIRST = frozenset({ConditionType.READY, ConditionType.PREPARED, ConditionType.TRAINED})


def find_delay(
    before: FineTuneJobStatus, decision: Decision, results: Iterable[ActionResult]
) -> float | None:
    """The seconds that the status of a pass may wait; None if it must be written now.

    Args:
        before: the status that the decision is based on.
        results: the results of the decision's actions.
    """
    if decision.finalizer is not None or decision.lease:
        return None
    if _starts_attempt(before, decision):
        return _MAX_WAIT_FOR_PODS_SECONDS
    pending_seconds = [result.pending_seconds for result in results if result.pending_seconds is not None]
    remaining_seconds = _MAX_WAIT_FOR_RUN_SECONDS - max(pending_seconds, default=_MAX_WAIT_FOR_RUN_SECONDS)
    if remaining_seconds > 0 and _waits_for_run(before, decision):
        return remaining_seconds
    return None


def _starts_attempt(before: FineTuneJobStatus, decision: Decision) -> bool:
    """Whether a pass only creates a Job: the phase and the reasons of all conditions stay the same, and nothing but the Job is recorded."""
    after = decision.status
    creates_job = any(body["kind"] == "Job" for body in decision.apply)
    if not creates_job or decision.actions:
        return False
    changed_fields = {
        name for name in FineTuneJobStatus.model_fields if getattr(before, name) != getattr(after, name)
    }
    return changed_fields <= _DERIVED_FIELDS and _list_reasons(before) == _list_reasons(after)


def _waits_for_run(before: FineTuneJobStatus, decision: Decision) -> bool:
    """Whether a new job has no problem, and only its run is being created."""
    if (
        before.conditions
        or decision.apply
        or not all(isinstance(item, EnsureRun) for item in decision.actions)
    ):
        return False
    conditions = decision.status.conditions
    return all(item.status == "True" or item.type in _FALSE_AT_FIRST for item in conditions) and not any(
        item.type == ConditionType.STALLED and item.status == "True" for item in conditions
    )


def _list_reasons(status: FineTuneJobStatus) -> list[tuple[str, str, str]]:
    return sorted((item.type, item.status, item.reason) for item in status.conditions)
