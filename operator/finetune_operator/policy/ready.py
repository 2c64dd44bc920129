"""The conditions Ready, Reconciling, Stalled and Finished: the summary that kstatus, Flux and `kubectl wait` read.

Each kind chooses, in its own `decide/ready.py`, which of them are True and which other condition explains the state.
https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from finetune_crds.conditions import SUMMARY, ConditionType
from finetune_operator.policy.status import Status, with_condition


class Readiness(NamedTuple):
    """The content of the summary conditions; reason and message come from the condition that explains the state."""

    holds: bool
    """Whether Ready is True."""
    also: Collection[ConditionType]
    """The other summary conditions that are True. The rest is removed from the status."""
    reason: str
    message: str


def summarize(status: Status, readiness: Readiness, phase: str, *, now: datetime, generation: int) -> Status:
    """The status with its phase, its summary conditions, and the generation that they are about."""
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
