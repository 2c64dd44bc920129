"""Whose losses at which rungs are read."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.sweep import Rung, Sweep, SweepStatus, Trial
from finetune_operator.finetunejob.sweep.rungs import DueRead, list_due_reads

Json = dict[str, Any]
SWEEP = Sweep.model_validate(
    {
        "algorithm": "ASHA",
        "trials": 3,
        # A set: the API server keeps it in any order.
        "rungs": [30, 10],
        "parameters": [{"field": "training.seed", "values": [1, 2, 3]}],
    }
)
REACHED = [Rung(step=10, metric=0.5), Rung(step=30, metric=0.4)]
# The number of recorded rungs, of promotions, the phase and the step of a trial, and the step of the rung that is due.
DUE: dict[str, tuple[int, int, Any, int, int | None]] = {
    "before its rung": (0, 0, "Training", 9, None),
    "at its rung": (0, 0, "Training", 10, 10),
    "past its rung": (0, 0, "Training", 31, 10),
    "it waits": (1, 0, "Suspended", 31, None),
    "it went on": (1, 1, "Suspended", 31, 30),
    "it went past all rungs": (2, 2, "Training", 40, None),
    "it has ended before it was seen": (0, 0, "Succeeded", 40, 10),
    "it has ended before its rung": (0, 0, "Failed", 5, None),
    "its last step": (1, 1, "Training", 30, None),
}
MAX_STEPS = {"its last step": 30}


@pytest.mark.parametrize("case", DUE)
def test_which_rung_is_due(case: str) -> None:
    rungs, promotions, phase, step, due = DUE[case]
    trial = Trial(n=2, parameters={}, phase=phase, rungs=REACHED[:rungs], promotions=promotions)
    progress = {"step": step, "maxSteps": MAX_STEPS.get(case, 100)}
    child: Json = {"status": {"progress": progress, "mlflow": {"runId": "r"}}}
    due_reads = list_due_reads(SWEEP, SweepStatus(trials=[trial]), {"tune-2": child}, "tune")
    assert due_reads == ([DueRead(2, "r", due)] if due else [])


def test_a_trial_without_a_run_or_a_child_has_no_losses() -> None:
    recorded = SweepStatus(trials=[Trial(n=1, parameters={}), Trial(n=2, parameters={})])
    child: Json = {"status": {"progress": {"step": 10}}}
    assert list_due_reads(SWEEP, recorded, {"tune-1": child}, "tune") == []
    assert list_due_reads(SWEEP, None, {}, "tune") == []
