"""The conditions Ready, Reconciling and Stalled: the summary that kstatus, Flux and `kubectl wait` read.

Each kind decides in its own `decide/ready.py` what they say, and which condition explains that.
https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

from finetune_crds.conditions import Condition, ConditionType
from finetune_operator.policy.status import Status, with_condition

Progress = Literal[ConditionType.RECONCILING, ConditionType.STALLED]
_PROGRESS: tuple[Progress, ...] = (ConditionType.RECONCILING, ConditionType.STALLED)


class Readiness(NamedTuple):
    """What the summary says. Reason and message are those of the condition that explains it."""

    holds: bool
    """Whether Ready is True."""
    progress: Progress | None
    """The condition besides Ready that is True; None: the resource is at rest."""
    reason: str
    message: str


def summarized(status: Status, readiness: Readiness, phase: str, *, now: datetime, generation: int) -> Status:
    """The status with what follows from its other conditions: the phase, the summary, and their generation."""
    conditions: list[Condition] = [
        item for item in status.conditions if item.type not in _PROGRESS or item.type == readiness.progress
    ]
    said: dict[ConditionType, bool] = {ConditionType.READY: readiness.holds}
    if readiness.progress is not None:
        said[readiness.progress] = True
    for kind, holds in said.items():
        conditions = with_condition(
            conditions, kind, holds, readiness.reason, readiness.message, now=now, generation=generation
        )
    return status.model_copy(
        update={"conditions": conditions, "phase": phase, "observed_generation": generation}
    )
