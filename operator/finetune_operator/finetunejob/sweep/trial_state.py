"""What a sweep reads of its FineTuneJobs.

NB: the status is read as JSON. To parse the spec and the status of 100 trials takes a tenth of a second of each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionType
from finetune_crds.status_parts import Phase
from finetune_operator.finetunejob.model import FINISHED_PHASES


def read_phase(child: Json) -> Phase:
    """The phase of a child; Pending until it has one."""
    phase: Phase = _status(child).get("phase") or "Pending"
    return phase


def is_finished(child: Json) -> bool:
    """Whether a child has succeeded or failed."""
    return read_phase(child) in FINISHED_PHASES


def is_waiting(child: Json) -> bool:
    """Whether a child waits in a queue or for a node, or is suspended."""
    return "waitingSince" in _status(child)


def read_loss(child: Json) -> float | None:
    """The evaluation loss of a trial that has succeeded; None if it has none."""
    if read_phase(child) != "Succeeded":
        return None
    loss: float | None = _part(child, "model").get("evalLoss")
    return loss


def read_step(child: Json) -> int | None:
    """The optimizer steps that a child has done; None before its training."""
    step: int | None = _part(child, "progress").get("step")
    return step


def has_reached(child: Json, step: int) -> bool:
    """Whether a child has done this step, and has another one to do or has ended after it: at its last step, it delivers its model."""
    progress = _part(child, "progress")
    done, max_steps = progress.get("step") or 0, progress.get("maxSteps")
    return step <= done and (max_steps is None or step < max_steps)


def read_part(child: Json, name: str) -> Json | None:
    """A part of the status of a child; None if it is not set."""
    return _status(child).get(name)


def find_false_condition(child: Json, kinds: Iterable[ConditionType]) -> Json | None:
    """The first condition of these types that is False; None without one."""
    conditions = (condition for kind in kinds if (condition := find_condition(child, kind)))
    return next((condition for condition in conditions if condition["status"] == "False"), None)


def find_condition(child: Json, kind: ConditionType) -> Json | None:
    """A condition of a child; None if it is not set."""
    return next((item for item in _conditions(child) if item["type"] == kind), None)


def _conditions(child: Json) -> Iterator[Json]:
    yield from _status(child).get("conditions") or ()


def _part(child: Json, name: str) -> Json:
    part: Any = _status(child).get(name)
    return part or {}


def _status(child: Json) -> Json:
    status: Json = child.get("status") or {}
    return status
