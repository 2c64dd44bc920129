from __future__ import annotations

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from finetune_operator.registry.outages import Outages

AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "no answer")


def test_a_server_that_cannot_be_reached_is_left_alone_for_a_time() -> None:
    seconds = 100.0
    outages = Outages(lambda: seconds, 10)
    outages.note("http://a", AWAY)
    assert (outages.of("http://a"), outages.of("http://b")) == (AWAY, None)
    seconds = 110.0
    assert outages.of("http://a") is None


def test_a_server_that_answers_with_an_error_is_contacted() -> None:
    outages = Outages(lambda: 0.0, 10)
    outages.note("http://a", Problem(ConditionReason.MLFLOW_FORBIDDEN, "403"))
    assert outages.of("http://a") is None
