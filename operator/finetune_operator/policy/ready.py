"""The condition Ready: the summary that kstatus, Flux and `kubectl wait` read.

Each kind decides in its own `decide/ready.py` when it is ready, and which condition explains that.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from finetune_crds.conditions import Condition, ConditionType
from finetune_operator.policy.status import with_condition


class Readiness(NamedTuple):
    """What the condition Ready says. Reason and message are those of the condition that explains it."""

    holds: bool
    reason: str
    message: str


def with_ready(
    conditions: Sequence[Condition], readiness: Readiness, *, now: datetime, generation: int
) -> list[Condition]:
    """The conditions with Ready set; its transition time moves only when its status does."""
    holds, reason, message = readiness
    return with_condition(
        conditions, ConditionType.READY, holds, reason, message, now=now, generation=generation
    )
