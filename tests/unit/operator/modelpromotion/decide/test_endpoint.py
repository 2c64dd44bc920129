"""The endpoint as it was read: whose it is, and whether it is as the spec wants it."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.serving import ServingStatus
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.model import Observed
from finetune_operator.serving.model import Endpoint, ServedVersion
from unit.operator.modelpromotion.decide.rollout import CANARY, GATE, decided, promotion, serving
from unit.operator.modelpromotion.decide.serving_cases import (
    READY,
    SAVED,
    SETTINGS,
    STEADY,
    TO_ALL,
    UPDATING,
    Case,
    Json,
    change,
    check,
    described,
    served,
    there,
)

CASES: dict[str, Case] = {
    "not asked": Case(endpoint=None, condition=None, serving=None),
    "Databricks does not answer": Case(
        endpoint=Endpoint(problem=Problem(ConditionReason.DATABRICKS_UNREACHABLE, "no answer")),
        condition=(None, ConditionReason.DATABRICKS_UNREACHABLE, "no answer"),
        before={"endpoint": "support", "version": "2", "step": 1},
        serving={"endpoint": "support", "version": "2", "step": 1},
        requeue=5.0,
    ),
    "an endpoint of another owner": Case(
        endpoint=there(served=(ServedVersion("main.llm.other", "1", 100), ServedVersion("", "", 0))),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support serves another provider's model and the model main.llm.other, so the operator does not "
            "change the endpoint: set spec.serving.endpoint to another name, or delete the endpoint",
        ),
        serving={
            "endpoint": "support",
            "url": "https://w/support",
            "state": "Ready",
            "routes": [{"version": "1", "percent": 100}, {"version": "", "percent": 0}],
        },
    ),
    "the same model in other letters": Case(
        endpoint=there(served=(ServedVersion("Main.LLM.support", "2", 100),)),
        spec={"tracking": {"registryUri": "databricks-uc"}},
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
    "a model in other letters, where letters count": Case(
        endpoint=there(served=(ServedVersion("Main.LLM.support", "2", 100),)),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support serves the model Main.LLM.support, so the operator does not "
            "change the endpoint: set spec.serving.endpoint to another name, or delete the endpoint",
        ),
        serving={
            "endpoint": "support",
            "url": "https://w/support",
            "state": "Ready",
            "routes": [{"version": "2", "percent": 100}],
        },
    ),
    "a change by another client that failed": Case(
        endpoint=there(
            "r2", served=served(v2=100), pending=served(v7=100), failed=True, message="no machine"
        ),
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described("UpdateFailed", {"v2": 100}, settings=SETTINGS, revision="r2"),
    ),
    "an old failure is not ours": Case(
        endpoint=there(served=served(v1=100), failed=True, message="no machine"),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described("UpdateFailed", {"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        asks=served(v2=100),
        requeue=5.0,
    ),
    "another size by hand": Case(
        endpoint=there("r2", served=served(v2=100), matches_spec=False),
        before=described(**STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v2": 100}, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
    "worded otherwise by Databricks": Case(
        endpoint=there(served=served(v2=100), matches_spec=False),
        before=described(**STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, **STEADY),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)


def test_the_digest_is_of_what_databricks_is_told() -> None:
    """An edit of anything else changes nothing at the endpoint."""
    edits: dict[str, Json] = {
        "a canary": {"canary": CANARY},
        "a Secret": {"secretRef": {"name": "other"}},
        "defaults": {"workloadSize": "Small", "workloadType": "CPU", "scaleToZero": True},
        "a gate": {"canary": {"steps": [{"percent": 5, "durationSeconds": 60}], "gates": [GATE]}},
    }
    for name, edit in edits.items():
        status = ModelPromotionStatus(
            promoted="2", previous="1", serving=ServingStatus.model_validate(described(**STEADY))
        )
        resource = promotion(status, 2, serving=serving(**edit))
        decision = decided(resource, Observed(endpoint=there(served=served(v2=100))))
        assert (name, decision.actions, decision.requeue_seconds) == (name, (), None)
