"""The condition Ready: the summary that kstatus, Flux and `kubectl wait` read.

Each kind decides in its own `decide/ready.py` when it is ready, and which condition explains that.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from finetune_crds.conditions import ConditionType
from finetune_operator.policy.status import Status, with_condition


class Readiness(NamedTuple):
    """What the condition Ready says. Reason and message are those of the condition that explains it."""

    holds: bool
    reason: str
    message: str


def summarized(status: Status, readiness: Readiness, phase: str, *, now: datetime, generation: int) -> Status:
    """The status with what follows from its other conditions: the phase, Ready, and the generation they are about."""
    holds, reason, message = readiness
    conditions = with_condition(
        status.conditions, ConditionType.READY, holds, reason, message, now=now, generation=generation
    )
    return status.model_copy(
        update={"conditions": conditions, "phase": phase, "observed_generation": generation}
    )
