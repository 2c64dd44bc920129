"""Registration: the trainer makes the version, the operator writes its aliases."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus, FineTuneJobStatus, MlflowStatus, ModelStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import FinishRun, SetAlias
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    NOW,
    PREPARED,
    SETTINGS,
    TRAINED,
    conclude,
    condition,
    ftj,
    later,
    observed,
    said,
    status,
    tracked,
)

BEFORE = status(
    ACCEPTED,
    PREPARED,
    TRAINED,
    attempt=1,
    mlflow=MlflowStatus(experiment_id="e1", run_id="r1"),
    model=ModelStatus(eval_loss=2.0),
)
AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://m cannot be reached: no"))


def register(
    mlflow: Mlflow | None,
    seconds: float = 0,
    aliases: list[str] | None = None,
    before: FineTuneJobStatus = BEFORE,
    **fields: Any,
) -> Any:
    registration = {"model": "tuned"} | ({} if aliases is None else {"aliases": aliases})
    job = ftj(before, register=registration)
    return conclude(job, observed(mlflow=mlflow, **fields), at=later(seconds), settings=SETTINGS)


def test_aliases_are_set_once() -> None:
    missing = register(tracked(RegisteredVersion("tuned", "4", frozenset({"b"}))), aliases=["a", "b", "c"])
    assert missing.actions == (SetAlias("tuned", "a", "4"), SetAlias("tuned", "c", "4"))
    assert said(missing, ConditionType.REGISTERED) == ("False", ConditionReason.REGISTERING, "setting a, c")
    assert missing.status.phase == "Registering"
    simulation = register(tracked(RegisteredVersion("tuned", "4", frozenset("abc"))), aliases=["a", "b", "c"])
    assert simulation.actions == (FinishRun("r1", "FINISHED"),)
    assert said(simulation, ConditionType.REGISTERED) == (
        "True",
        ConditionReason.REGISTERED,
        "tuned version 4, now a, b, c",
    )
    assert simulation.status.phase == "Succeeded"


def test_the_version_becomes_the_status() -> None:
    decision = register(tracked(RegisteredVersion("tuned", "4", frozenset({"candidate"}))))
    assert decision.status.model == ModelStatus(
        name="tuned",
        version="4",
        uri="models:/tuned/4",
        summary="tuned/4",
        aliases=["candidate"],
        eval_loss=2.0,
    )


OWNED: dict[str, tuple[list[str], frozenset[str], str]] = {
    "one of two": (
        ["candidate", "champion"],
        frozenset({"candidate"}),
        "tuned version 4, now candidate; ModelPromotion team/prod manages alias champion",
    ),
    "the only one": (
        ["champion"],
        frozenset(),
        "tuned version 4; ModelPromotion team/prod manages alias champion",
    ),
}


@pytest.mark.parametrize(("aliases", "pointing", "message"), OWNED.values(), ids=OWNED)
def test_an_alias_that_a_promotion_keeps_is_left_to_it(
    aliases: list[str], pointing: frozenset[str], message: str
) -> None:
    version = RegisteredVersion("tuned", "4", pointing)
    decision = register(tracked(version), aliases=aliases, promoted_aliases={"champion": "team/prod"})
    assert said(decision, ConditionType.REGISTERED) == ("True", ConditionReason.REGISTERED, message)
    assert decision.actions == (FinishRun("r1", "FINISHED"),)


def test_no_alias_need_be_asked_for() -> None:
    decision = register(tracked(RegisteredVersion("tuned", "4")), aliases=[])
    assert said(decision, ConditionType.REGISTERED) == ("True", ConditionReason.REGISTERED, "tuned version 4")
    assert decision.status.model.aliases is None


MISSING = (
    "training ended without a version of tuned from run r1: create a FineTuneJob with another name whose script "
    "registers a version of the run in MLFLOW_RUN_ID, or that has no spec.register"
)
EXPECTED = "waiting for a version of tuned"
# What the condition said when the job had trained; what MLflow says now, and how many seconds later; what the condition says then.
WAITING: dict[str, tuple[str, Mlflow | None, float, tuple[str, str, str]]] = {
    "the version may still come": (EXPECTED, tracked(), 59, ("False", ConditionReason.REGISTERING, EXPECTED)),
    "the version will not come": (
        EXPECTED,
        tracked(),
        60,
        ("False", ConditionReason.REGISTRATION_FAILED, MISSING),
    ),
    "MLflow was away until now": (
        "registration waits for MLflow: it was away",
        tracked(),
        6000,
        ("False", ConditionReason.REGISTERING, EXPECTED),
    ),
    "MLflow is away, however long": (
        EXPECTED,
        AWAY,
        6000,
        (
            "False",
            ConditionReason.MLFLOW_UNREACHABLE,
            "registration waits for MLflow: MLflow at http://m cannot be reached: no",
        ),
    ),
    "MLflow was not read yet, however long": (
        EXPECTED,
        None,
        6000,
        ("False", ConditionReason.REGISTERING, EXPECTED),
    ),
}


@pytest.mark.parametrize(("message", "mlflow", "seconds", "expected"), WAITING.values(), ids=WAITING)
def test_waiting(message: str, mlflow: Mlflow | None, seconds: float, expected: tuple[str, str, str]) -> None:
    waiting = condition(ConditionType.REGISTERED, "False", ConditionReason.REGISTERING, message)
    before = BEFORE.model_copy(update={"conditions": [*BEFORE.conditions, waiting]})
    decision = register(mlflow, seconds, before=before)
    assert said(decision, ConditionType.REGISTERED) == expected
    failed = expected[1] == ConditionReason.REGISTRATION_FAILED
    assert decision.status.phase == ("Failed" if failed else "Registering")
    assert not any(isinstance(action, SetAlias) for action in decision.actions)
    assert failed or decision.requeue_seconds == SETTINGS.poll_seconds


def test_before_anything_was_read() -> None:
    assert said(register(None, 0), ConditionType.REGISTERED) == (
        "False",
        ConditionReason.REGISTERING,
        "registration waits for the first response of MLflow",
    )


CHECKPOINT = CheckpointStatus(step=40, uri="/checkpoints/tune")
# What the status has, and parts of the spec; whether another attempt registers the model.
AGAIN: dict[str, tuple[Json, Json, bool]] = {
    "from its last checkpoint": ({"checkpoint": CHECKPOINT}, {}, True),
    "not where it would train again": ({}, {}, False),
    "not more often than it may restart": (
        {"checkpoint": CHECKPOINT, "restarts": 1},
        {"runPolicy": {"maxRestarts": 1}},
        False,
    ),
    "not a script, which registers as it likes": (
        {"checkpoint": CHECKPOINT},
        {"trainer": {"command": ["python", "train.py"]}},
        False,
    ),
}


@pytest.mark.parametrize(("recorded_status", "parts", "again"), AGAIN.values(), ids=AGAIN)
def test_a_version_that_does_not_become_ready_is_registered_again(
    recorded_status: Json, parts: Json, again: bool
) -> None:
    waiting = condition(ConditionType.REGISTERED, "False", ConditionReason.REGISTERING, EXPECTED)
    before = BEFORE.model_copy(
        update={"conditions": [*BEFORE.conditions, waiting], "attempt": 2, **recorded_status}
    )
    job = ftj(before, register={"model": "tuned"}, **parts)
    decision = conclude(job, observed(mlflow=tracked()), at=later(60), settings=SETTINGS)
    assert (decision.status.phase == "Failed") != again
    if again:
        assert (decision.status.attempt, decision.status.restarts) == (3, 1)
        assert said(decision, ConditionType.REGISTERED) is None
        assert said(decision, ConditionType.TRAINED) == (
            "False",
            ConditionReason.RESTARTING,
            "attempt 2 ended without a READY version of tuned; the next attempt registers the model again; attempt 3 resumes from the newest checkpoint",
        )


def test_nothing_is_registered_when_nothing_is_asked_for() -> None:
    decision = conclude(ftj(BEFORE), observed(mlflow=tracked()), settings=SETTINGS)
    assert said(decision, ConditionType.REGISTERED) is None
    assert said(decision, ConditionType.SUCCEEDED) == (
        "True",
        ConditionReason.SUCCEEDED,
        "the job completed every step of its spec",
    )
    assert decision.status.completion_time == NOW
