"""A new status, and which changes make it another one."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.status import with_condition
from fixtures.operator_in_memory.decisions import NO_MLFLOW, NOW, TRAINING, ftj, later, observed, status

BEFORE = status(TRAINING, attempt=1)

# What is set instead of the condition of BEFORE, whether the status changes, and the transition time.
CONDITIONS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "the same condition": ({}, False, False),
    "another message": ({"message": "more"}, True, False),
    "another reason": ({"reason": ConditionReason.STARTING}, True, False),
    "another generation": ({"generation": 2}, True, False),
    "another status": ({"holds": True}, True, True),
    "unknown": ({"holds": None}, True, True),
}


@pytest.mark.parametrize(("changes", "is_changed", "is_transition"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_that_is_set_again_changes_nothing(
    changes: dict[str, Any], is_changed: bool, is_transition: bool
) -> None:
    values: dict[str, Any] = {
        "holds": False,
        "reason": TRAINING.reason,
        "message": TRAINING.message,
        "generation": 1,
        **changes,
    }
    after = with_condition(BEFORE, ConditionType.TRAINED, now=later(60), **values)
    (condition,) = after.conditions
    assert (after is not BEFORE, condition != TRAINING) == (is_changed, is_changed)
    assert condition.last_transition_time == (later(60) if is_transition else NOW)


# The fields that are set, and whether the status changes.
FIELDS: dict[str, tuple[dict[str, Any], bool]] = {
    "the same value": ({"attempt": 1}, False),
    "another value": ({"attempt": 2}, True),
    "one of two": ({"attempt": 1, "restarts": 0}, True),
    # Statuses are equal only if the same fields were set.
    "the default of a field that was not set": ({"restarts": None}, True),
}


@pytest.mark.parametrize(("fields", "is_changed"), FIELDS.values(), ids=FIELDS)
def test_a_field_that_is_set_again_changes_nothing(fields: dict[str, Any], is_changed: bool) -> None:
    draft = Draft(ftj(BEFORE), observed(), NOW, NO_MLFLOW)
    draft.update(**fields)
    assert (draft.status is not BEFORE) is is_changed
    assert draft.status.model_fields_set >= fields.keys()
    assert {name: getattr(draft.status, name) for name in fields} == fields
