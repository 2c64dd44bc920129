"""What a policy returns: whether the policies after it run in this pass."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """`Continue`: the next policy runs. `Stop`: this policy settled the pass."""

    CONTINUE = "Continue"
    STOP = "Stop"


Continue = Outcome.CONTINUE
Stop = Outcome.STOP
