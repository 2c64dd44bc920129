"""Changes of the endpoint: recorded by one pass, requested by the next."""

from __future__ import annotations

import pytest

from finetune_operator.serving.model import Endpoint
from unit.operator.modelpromotion.decide.serving_cases import (
    BUSY,
    READY,
    SAVED,
    SETTINGS,
    STEADY,
    TO_ALL,
    UPDATING,
    WAITING,
    Case,
    change,
    check,
    described,
    served,
    there,
)

CASES: dict[str, Case] = {
    "missing: written down": Case(
        endpoint=Endpoint(),
        condition=(False, UPDATING, TO_ALL),
        serving={
            "endpoint": "support",
            "state": "Missing",
            "version": "2",
            "saved": [],
            "change": change(None, v2=100),
        },
        requeue=0.0,
    ),
    "missing: created": Case(
        endpoint=Endpoint(),
        before={"endpoint": "support", "version": "2", "saved": [], "change": change(None, v2=100)},
        condition=(False, UPDATING, TO_ALL),
        serving={
            "endpoint": "support",
            "state": "Missing",
            "version": "2",
            "saved": [],
            "change": change(None, v2=100),
        },
        asks=served(v2=100),
        creates=True,
        requeue=5.0,
    ),
    "another version: saved and written down": Case(
        endpoint=there(served=served(v1=100)),
        before=described(version="1", **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=0.0,
    ),
    "another version: asked for": Case(
        endpoint=there(served=served(v1=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        asks=served(v2=100),
        requeue=5.0,
    ),
    "another version: another client was faster": Case(
        endpoint=there("r2", served=served(v7=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v7": 100}, saved=SAVED, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
    "another version: in progress": Case(
        endpoint=there("r2", served=served(v1=100), pending=served(v2=100), updating=True),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described("Updating", {"v1": 100}, saved=SAVED, change=change(v2=100), **STEADY),
        requeue=5.0,
    ),
    "another version: in place": Case(
        endpoint=there("r2", served=served(v2=100)),
        before=described(saved=SAVED, change=change(v2=100), **STEADY),
        condition=(True, READY, "endpoint support serves version 2 with 100%"),
        serving=described(shares={"v2": 100}, settings=SETTINGS, revision="r2"),
    ),
    "configured, not ready": Case(
        endpoint=Endpoint(exists=True, revision="r2", url="https://w/support", served=served(v2=100)),
        before=described(saved=[], change=change(None, v2=100)),
        condition=(False, UPDATING, "endpoint support is configured but does not respond yet"),
        serving=described("NotReady", {"v2": 100}, saved=[], settings=SETTINGS, revision="r2"),
        requeue=5.0,
    ),
    "a change by another client": Case(
        endpoint=there("r2", served=served(v2=100), pending=served(v7=100), updating=True),
        before=described(**STEADY),
        condition=(False, BUSY, WAITING),
        serving=described("Updating", {"v2": 100}, **STEADY),
        requeue=5.0,
    ),
    "changed by hand": Case(
        endpoint=there("r2", served=served(v2=50, v7=50)),
        before=described(**STEADY),
        condition=(False, UPDATING, TO_ALL),
        serving=described(shares={"v2": 50, "v7": 50}, change=change("r2", v2=100), **STEADY),
        requeue=0.0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)
