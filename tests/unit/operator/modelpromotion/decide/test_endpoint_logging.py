"""Where the endpoint's requests are logged."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.serving import InferenceTable
from finetune_operator.serving.model import LogRequests, StopLogging
from unit.operator.modelpromotion.decide.rollout import serving
from unit.operator.modelpromotion.decide.serving_cases import (
    READY,
    STEADY,
    UPDATING,
    Case,
    Json,
    change,
    check,
    described,
    served,
    there,
)

TABLE: Json = {"catalog": "main", "schema": "logs", "tablePrefix": "support"}
ANY_PREFIX: Json = {"catalog": "main", "schema": "logs"}
OTHER: Json = {"catalog": "main", "schema": "other", "tablePrefix": "support"}
IN_PLACE = "endpoint support serves version 2 with 100%"
NOW_LOGS = "endpoint support is being configured to log its requests"


def logging(
    *,
    wanted: Json | None = None,
    found: Json | None = None,
    known: Json | None = None,
    after: Any,
    **parts: Any,
) -> Case:
    """An endpoint at rest. `known`: the table of the status before; `after`: what differs in it afterwards."""
    table = InferenceTable.model_validate(found) if found else None
    return Case(
        endpoint=there(served=served(v2=100), logged_to=table),
        before=described(**STEADY) | ({"inferenceTable": known} if known else {}),
        spec={"serving": serving(**({"inferenceTable": wanted} if wanted else {}))},
        serving=described(shares={"v2": 100}, **STEADY) | after,
        **({"condition": (True, READY, IN_PLACE)} | parts),
    )


def ends(schema: str) -> Json:
    """What a pass decides that ends the logging to a schema."""
    message = f"endpoint support is being configured to log no more requests in main.{schema}"
    return {"condition": (False, UPDATING, message), "logs": StopLogging, "requeue": 5.0}


MOVES: Json = {"change": change(v2=100)}
CASES: dict[str, Case] = {
    "wanted: recorded first": logging(
        wanted=TABLE,
        after={"inferenceTable": TABLE},
        condition=(False, UPDATING, NOW_LOGS),
        requeue=0.0,
    ),
    "wanted and recorded: requested": logging(
        wanted=TABLE,
        known=TABLE,
        after={"inferenceTable": TABLE} | MOVES,
        condition=(False, UPDATING, NOW_LOGS),
        logs=LogRequests,
        requeue=5.0,
    ),
    "as wanted": logging(wanted=TABLE, found=TABLE, known=TABLE, after={"inferenceTable": TABLE}),
    "as wanted, before the operator asked": logging(
        wanted=TABLE, found=TABLE, after={"inferenceTable": TABLE}
    ),
    "any prefix": logging(wanted=ANY_PREFIX, found=TABLE, after={"inferenceTable": ANY_PREFIX}),
    "another table": logging(
        wanted=TABLE, found=OTHER, known=OTHER, after={"inferenceTable": OTHER} | MOVES, **ends("other")
    ),
    "removed from the spec": logging(
        found=TABLE, known=TABLE, after={"inferenceTable": TABLE} | MOVES, **ends("logs")
    ),
    "removed from the spec, and ended": logging(known=TABLE, after={}),
    "never in the spec": logging(found=TABLE, after={}),
    "removed from the spec, and taken over by another client": logging(found=OTHER, known=TABLE, after={}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)
