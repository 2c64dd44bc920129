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
    spec_table: Json | None = None,
    current_table: Json | None = None,
    recorded_table: Json | None = None,
    after: Any,
    **parts: Any,
) -> Case:
    """An endpoint at rest. `recorded_table`: the table of the status before; `after`: what differs in it afterwards."""
    table = InferenceTable.model_validate(current_table) if current_table else None
    return Case(
        endpoint=there(served=served(v2=100), logged_to=table),
        before=described(**STEADY) | ({"inferenceTable": recorded_table} if recorded_table else {}),
        spec={"serving": serving(**({"inferenceTable": spec_table} if spec_table else {}))},
        serving=described(shares={"v2": 100}, **STEADY) | after,
        **({"condition": (True, READY, IN_PLACE)} | parts),
    )


def ends(schema: str) -> Json:
    """What a pass decides that ends the logging to a schema."""
    message = f"endpoint support is being configured to stop logging requests to main.{schema}"
    return {"condition": (False, UPDATING, message), "logs": StopLogging, "requeue": 5.0}


MOVES: Json = {"change": change(v2=100)}
CASES: dict[str, Case] = {
    "wanted: recorded first": logging(
        spec_table=TABLE,
        after={"inferenceTable": TABLE},
        condition=(False, UPDATING, NOW_LOGS),
        requeue=0.0,
    ),
    "wanted and recorded: requested": logging(
        spec_table=TABLE,
        recorded_table=TABLE,
        after={"inferenceTable": TABLE} | MOVES,
        condition=(False, UPDATING, NOW_LOGS),
        logs=LogRequests,
        requeue=5.0,
    ),
    "as wanted": logging(
        spec_table=TABLE, current_table=TABLE, recorded_table=TABLE, after={"inferenceTable": TABLE}
    ),
    "as wanted, before the operator asked": logging(
        spec_table=TABLE, current_table=TABLE, after={"inferenceTable": TABLE}
    ),
    "any prefix": logging(spec_table=ANY_PREFIX, current_table=TABLE, after={"inferenceTable": ANY_PREFIX}),
    "another table": logging(
        spec_table=TABLE,
        current_table=OTHER,
        recorded_table=OTHER,
        after={"inferenceTable": OTHER} | MOVES,
        **ends("other"),
    ),
    "removed from the spec": logging(
        current_table=TABLE, recorded_table=TABLE, after={"inferenceTable": TABLE} | MOVES, **ends("logs")
    ),
    "removed from the spec, and ended": logging(recorded_table=TABLE, after={}),
    "never in the spec": logging(current_table=TABLE, after={}),
    "removed from the spec, and taken over by another client": logging(
        current_table=OTHER, recorded_table=TABLE, after={}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decisions(case: Case) -> None:
    check(case)
