"""What the log says when the phase of a resource changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.status_parts import Phase
from finetune_operator.controller.events import EventTarget
from finetune_operator.controller.status import write_status
from finetune_operator.controller.store import Store
from fixtures.operator_in_memory.decisions import NOW, UID, condition


class FakeKube:
    """Takes what is written."""

    async def apply(self, body: Json, **_: Any) -> Json:
        return body

    async def create(self, body: Json) -> Json:
        return body


def ready(reason: ConditionReason) -> Condition:
    return condition(ConditionType.READY, "False", reason)


PHASES: dict[str, tuple[Phase, list[Condition], list[str]]] = {
    "a phase with its reason": (
        "Failed",
        [ready(ConditionReason.RECIPE_WRONG)],
        ["team/tune is Failed (RecipeWrong)"],
    ),
    "a reason that is the phase": ("Starting", [ready(ConditionReason.STARTING)], ["team/tune is Starting"]),
    "no reason yet": ("Starting", [], ["team/tune is Starting"]),
    "another reason alone": ("Pending", [ready(ConditionReason.QUEUED)], []),
}


@pytest.mark.parametrize(("phase", "conditions", "messages"), PHASES.values(), ids=PHASES)
async def test_a_new_phase_is_logged(
    phase: Phase, conditions: list[Condition], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    kube: Any = FakeKube()
    with caplog.at_level(logging.INFO):
        await write_status(
            kube,
            Store(),
            EventTarget("FineTuneJob", "tune", "team", UID),
            version="1",
            before=FineTuneJobStatus(phase="Pending"),
            after=FineTuneJobStatus(phase=phase, conditions=conditions),
            now=NOW,
        )
    assert caplog.messages == messages
