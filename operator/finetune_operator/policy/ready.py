"""The conditions Ready, Reconciling, Stalled and Finished: the summary that kstatus, Flux and `kubectl wait` read.

Each kind decides in its own `decide/ready.py` what they say, and which condition explains that.
https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from finetune_crds.conditions import SUMMARY, ConditionType
from finetune_operator.policy.status import Status, with_condition


class Readiness(NamedTuple):
    """What the summary says. Reason and message are those of the condition that explains it."""

    holds: bool
    """Whether Ready is True."""
    also: Collection[ConditionType]
    """The other conditions of the summary that are True; those that are not are absent."""
    reason: str
    message: str


def summarize(status: Status, readiness: Readiness, phase: str, *, now: datetime, generation: int) -> Status:
    """The status with what follows from its other conditions: the phase, the summary, and their generation."""
    absent = SUMMARY - {ConditionType.READY, *readiness.also}
    conditions = [item for item in status.conditions if item.type not in absent]
    status = status.model_copy(
        update={"conditions": conditions, "phase": phase, "observed_generation": generation}
    )
    for kind in (ConditionType.READY, *readiness.also):
        holds = readiness.holds if kind == ConditionType.READY else True
        status = with_condition(
            status, kind, holds, readiness.reason, readiness.message, now=now, generation=generation
        )
    return status
