"""The result of a policy: whether the policies after it run in this pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

Draft = TypeVar("Draft")


class Outcome(Enum):
    """`Continue`: the next policy runs. `Stop`: the pass ends with this policy."""

    CONTINUE = "Continue"
    STOP = "Stop"


Continue = Outcome.CONTINUE
Stop = Outcome.STOP


def run_policies(policies: Iterable[Callable[[Draft], Outcome]], draft: Draft) -> None:
    """Run policies in order, until one of them returns Stop."""
    for policy in policies:
        if policy(draft) is Stop:
            return
