"""Failures of the endpoint: the saved routes are restored, and the version is withdrawn."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason
from unit.operator.modelpromotion.decide.serving_cases import (
    CANNOT,
    FAILURE,
    NO_WITHDRAWAL,
    SAVED,
    STEADY,
    TO_ALL,
    UPDATING,
    Case,
    change,
    check,
    described,
    served,
    there,
)

CASES: dict[str, Case] = {
    "our change failed": Case(
        endpoint=there(
            "r2", served=served(v1=100), pending=served(v2=100), failed=True, message="no machine"
        ),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, CANNOT),
        serving=described(
            "UpdateFailed", {"v1": 100}, saved=SAVED, failure=FAILURE | {"message": CANNOT}, **STEADY
        ),
        withheld=CANNOT,
        requeue=0.0,
    ),
    "our change failed during a rollback": Case(
        endpoint=there("r2", served=served(v1=100), failed=True, message="no machine"),
        spec={"rollbackTo": {"type": "Version", "version": "2"}},
        reason="RolledBack",
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "endpoint support cannot serve version 2 as specified: its deployment failed: no machine; the endpoint is restored to version "
            f"1 with 100%: {NO_WITHDRAWAL}",
        ),
        serving=described(
            "UpdateFailed",
            {"v1": 100},
            saved=SAVED,
            failure=FAILURE
            | {
                "message": "endpoint support cannot serve version 2 as specified: its deployment failed: no machine; the endpoint is "
                f"restored to version 1 with 100%: {NO_WITHDRAWAL}"
            },
            **STEADY,
        ),
    ),
    "after a failure: back, written down": Case(
        endpoint=there("r2", served=served(v2=50, v1=50)),
        before=described(saved=SAVED, failure=FAILURE, **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(
            shares={"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY
        ),
        requeue=0.0,
    ),
    "after a failure: back, asked for": Case(
        endpoint=there("r2", served=served(v2=50, v1=50)),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(
            shares={"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY
        ),
        asks=served(v1=100),
        requeue=5.0,
    ),
    "after a failure: another change is in the way": Case(
        endpoint=there("r3", served=served(v2=50, v1=50), updating=True),
        before=described(saved=SAVED, failure=FAILURE, **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described("Updating", {"v2": 50, "v1": 50}, saved=SAVED, failure=FAILURE, **STEADY),
        requeue=5.0,
    ),
    "after a failure: going back failed too": Case(
        endpoint=there("r3", served=served(v2=50, v1=50), failed=True, message="no machine at all"),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(
            False,
            ConditionReason.ENDPOINT_FAILED,
            "it failed; the endpoint cannot be restored either: no machine at all",
        ),
        serving=described(
            "UpdateFailed",
            {"v2": 50, "v1": 50},
            saved=SAVED,
            failure=FAILURE,
            change=change("r2", v1=100),
            **STEADY,
        ),
    ),
    "after a failure: at rest": Case(
        endpoint=there("r3", served=served(v1=100)),
        before=described(saved=SAVED, failure=FAILURE, change=change("r2", v1=100), **STEADY),
        condition=(False, ConditionReason.ENDPOINT_FAILED, "it failed"),
        serving=described(shares={"v1": 100}, saved=SAVED, failure=FAILURE, **STEADY),
    ),
    "after a failure: the spec changed": Case(
        endpoint=there("r3", served=served(v1=100)),
        before=described(saved=SAVED, failure=FAILURE | {"generation": 0}, **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change("r3", v2=100), **STEADY),
        requeue=0.0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)
