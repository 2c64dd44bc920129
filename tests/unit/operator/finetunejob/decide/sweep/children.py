"""A job with a sweep and its FineTuneJobs, for the tests of what it decides."""

from __future__ import annotations

from typing import Any

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.sweep import SweepStatus, Trial
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.finetunejob.sweep import objects, values
from fixtures.operator_in_memory.decisions import ACCEPTED, conclude, ftj, later, status

Json = dict[str, Any]
RATES = [1e-4, 2e-4, 3e-4, 4e-4]
SWEEP: Json = {
    "parameters": [{"field": "training.learningRate", "values": RATES}],
    "algorithm": "Grid",
    "parallel": 2,
    "maxFailedTrials": 1,
}
CHECKPOINT: Json = {"uri": "s3://bucket/checkpoints"}
REGISTER: Json = {"model": "m"}


def sweep_job(
    *trials: Trial, conditions: tuple[Any, ...] = (), fields: Json | None = None, **parts: Any
) -> FineTuneJob:
    """The job tune, whose sweep is checked; `trials` are those that its status records."""
    before = status(
        ACCEPTED, *conditions, sweep=SweepStatus(planned=4, trials=list(trials)), **(fields or {})
    )
    return ftj(before, **({"sweep": SWEEP, "checkpoint": CHECKPOINT} | parts))


def record(number: int, phase: str = "Succeeded", metric: float | None = None) -> Trial:
    """A trial as the status records it."""
    return Trial.model_validate(
        {
            "n": number,
            "parameters": {"training.learningRate": values.format_value(RATES[number - 1])},
            "phase": phase,
            "metric": metric,
            **({"step": 10} if phase in ("Succeeded", "Failed") else {}),
        }
    )


def condition_of(kind: ConditionType, state: str, reason: ConditionReason, message: str) -> Json:
    """A condition of a child."""
    return {
        "type": kind.value,
        "status": state,
        "reason": reason.value,
        "message": message,
        "lastTransitionTime": "2026-08-01T12:00:00Z",
    }


def trial(
    number: int | str,
    phase: str = "Training",
    metric: float | None = None,
    *conditions: Json,
    spec: Json | None = None,
    parent: FineTuneJob | None = None,
    **fields: Any,
) -> Json:
    """A FineTuneJob of the sweep, as the store has it; `number` best is the last one."""
    job = parent or sweep_job()
    body = (
        objects.build_best(job, 1, {"training.learningRate": RATES[0]}, step=10)
        if number == "best"
        else objects.build_trial(job, int(number), {"training.learningRate": RATES[int(number) - 1]})
    )
    body["metadata"]["uid"] = f"uid-of-tune-{number}"
    body["spec"] |= spec or {}
    body["status"] = {"phase": phase, "conditions": [*conditions], **fields}
    if phase in ("Succeeded", "Failed"):
        body["status"].setdefault("progress", {"step": 10})
    if metric is not None:
        body["status"]["model"] = {"evalLoss": metric}
    return body


def decide_sweep(job: FineTuneJob, *children: Json, at: float = 0.0, **more: Any) -> Decision:
    """The decision about a job with these FineTuneJobs, without MLflow."""
    by_name = {child["metadata"]["name"]: child for child in children}
    return conclude(job, Observed(children=by_name), at=later(at), **more)
