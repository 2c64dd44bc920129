"""The rollout of a version to the endpoint."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.registry.base import ModelVersion
from finetune_operator.serving.model import Endpoint
from unit.operator.modelpromotion.decide.rollout import CANARY, serving
from unit.operator.modelpromotion.decide.serving_cases import (
    READY,
    SAVED,
    STEADY,
    TO_ALL,
    TO_SOME,
    UPDATING,
    Case,
    change,
    check,
    described,
    served,
    there,
)

CASES: dict[str, Case] = {
    "no version yet": Case(
        endpoint=Endpoint(),
        promoted=None,
        condition=(
            False,
            ConditionReason.WAITING_FOR_VERSION,
            "champion does not point to a version yet: the endpoint has nothing to serve",
        ),
        serving=None,
    ),
    "at rest": Case(
        endpoint=there(served=served(v2=100)),
        before=described(shares={"v2": 100}, **STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "a canary begins": Case(
        endpoint=there(served=served(v1=100)),
        spec={"serving": serving(canary=CANARY)},
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_SOME),
        serving=described(
            shares={"v1": 100}, saved=SAVED, step=1, steps=2, change=change(v2=10, v1=90), **STEADY
        ),
        versions={"2": ModelVersion("2", metrics={"latency": 50.0})},
        requeue=0.0,
    ),
    "no canary for a repair": Case(
        endpoint=there(served=served(v1=100)),
        spec={"serving": serving(canary=CANARY)},
        reason="Repaired",
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=0.0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)
