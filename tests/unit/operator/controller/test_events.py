"""Events: what is worth telling, and how."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator.controller import events
from finetune_operator.controller.events import Change
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    FAILED,
    NOW,
    TRAINED,
    TRAINING,
    UID,
    condition,
    later,
)

ABOUT = events.EventTarget("FineTuneJob", "tune", "team", UID)
AWAY = condition(ConditionType.TRACKED, "False", ConditionReason.MLFLOW_UNREACHABLE)
RESTARTING = condition(ConditionType.TRAINED, "False", ConditionReason.RESTARTING)
UNSCHEDULABLE = condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.UNSCHEDULABLE)

WITH_WARNING = condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED_WITH_WARNING)
CORRECTABLE = condition(
    ConditionType.FAILED, "True", ConditionReason.DATA_WRONG, "no row is left; this job has ended: apply ..."
)
CHANGES: dict[str, tuple[list[Condition], list[Condition], list[Condition]]] = {
    "nothing new": ([TRAINING], [TRAINING], []),
    "a new condition": ([], [AWAY], [AWAY]),
    "a new reason": ([TRAINING], [RESTARTING], [RESTARTING]),
    "a new status": ([TRAINING], [TRAINED], [TRAINED]),
    "other words alone": (
        [TRAINING],
        [condition(ConditionType.TRAINED, "False", ConditionReason.TRAINING, "other")],
        [],
    ),
    "another time alone": (
        [TRAINING],
        [condition(ConditionType.TRAINED, "False", ConditionReason.TRAINING, since=later(9))],
        [],
    ),
    "what made a job fail is said once": (
        [TRAINING],
        [condition(ConditionType.TRAINED, "False", ConditionReason(FAILED.reason), FAILED.message), FAILED],
        [FAILED],
    ),
    "how a corrected job is applied is said once": (
        [],
        [
            condition(ConditionType.PREPARED, "False", ConditionReason.DATA_WRONG, "no row is left"),
            CORRECTABLE,
        ],
        [CORRECTABLE],
    ),
    "accepted goes without saying": ([], [ACCEPTED], []),
    "accepted with a warning": ([], [WITH_WARNING], [WITH_WARNING]),
    "what was warned of is corrected": ([WITH_WARNING], [ACCEPTED], []),
    "Ready repeats another condition": (
        [],
        [AWAY, condition(ConditionType.READY, "False", ConditionReason.MLFLOW_UNREACHABLE)],
        [AWAY],
    ),
    "and so does what is as it should be": (
        [UNSCHEDULABLE],
        [
            condition(ConditionType.PODS_HEALTHY, "True", ConditionReason.PODS_RUNNING),
            condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED),
        ],
        [],
    ),
}


@pytest.mark.parametrize(("before", "after", "expected"), CHANGES.values(), ids=CHANGES)
def test_changes(before: list[Condition], after: list[Condition], expected: list[Condition]) -> None:
    assert [change.after for change in events.find_changes(before, after)] == expected


KINDS: dict[str, tuple[Condition, str]] = {
    "training": (TRAINING, "Normal"),
    "the end": (TRAINED, "Normal"),
    "a failure": (FAILED, "Warning"),
    "a restart": (RESTARTING, "Warning"),
    "MLflow is away": (AWAY, "Warning"),
    "MLflow is back": (condition(ConditionType.TRACKED, "True", ConditionReason.RUN_READY), "Normal"),
    "pods are held up": (UNSCHEDULABLE, "Warning"),
    "a node is on its way": (
        condition(ConditionType.PODS_HEALTHY, "False", ConditionReason.SCALING_UP),
        "Normal",
    ),
    "a warning of the preparation": (
        condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED_WITH_WARNING),
        "Warning",
    ),
    "in a queue": (condition(ConditionType.TRAINED, "False", ConditionReason.QUEUED), "Normal"),
    "in a queue that does not exist": (
        condition(ConditionType.TRAINED, "False", ConditionReason.QUEUE_INADMISSIBLE),
        "Warning",
    ),
    "a spec that cannot be read": (
        condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE),
        "Warning",
    ),
    "a repository that refuses": (
        condition(ConditionType.CODE_RESOLVED, "False", ConditionReason.GIT_FORBIDDEN),
        "Warning",
    ),
    "its commit": (condition(ConditionType.CODE_RESOLVED, "True", ConditionReason.CODE_RESOLVED), "Normal"),
    "a model that does not exist yet": (
        condition(ConditionType.MODELS_FOUND, "False", ConditionReason.WAITING_FOR_MODEL),
        "Normal",
    ),
    "a registry that refuses": (
        condition(ConditionType.MODELS_FOUND, "False", ConditionReason.MLFLOW_FORBIDDEN),
        "Warning",
    ),
    "a run that cannot be carried on": (
        condition(ConditionType.CHECKPOINT_FOUND, "False", ConditionReason.INVALID_SPEC),
        "Warning",
    ),
    "accepted with a warning": (
        condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED_WITH_WARNING),
        "Warning",
    ),
    "refused": (condition(ConditionType.ACCEPTED, "False", ConditionReason.INVALID_SPEC), "Warning"),
}


@pytest.mark.parametrize(("condition", "kind"), KINDS.values(), ids=KINDS)
def test_bad_news_is_a_warning(condition: Condition, kind: str) -> None:
    assert events.build_event(ABOUT, Change(None, condition), NOW)["type"] == kind


def test_an_event() -> None:
    refused = condition(ConditionType.TRACKED, "False", ConditionReason.MLFLOW_ERROR, "x" * 2000)
    event = events.build_event(ABOUT, Change(None, refused), NOW)
    assert event["metadata"].pop("name").startswith("tune.")
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "team"},
        "involvedObject": {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "name": "tune",
            "namespace": "team",
            "uid": UID,
        },
        "type": "Warning",
        "reason": "MlflowError",
        "message": "x" * 1024,
        "source": {"component": "finetune-operator"},
        "reportingComponent": "finetune-operator",
        "firstTimestamp": "2026-08-01T12:00:00Z",
        "lastTimestamp": "2026-08-01T12:00:00Z",
        "count": 1,
    }


SINCE_LATER = condition(ConditionType.TRAINED, "False", ConditionReason.RESTARTING, since=later(9))
OTHER_CHANGES: dict[str, tuple[Change, bool]] = {
    "by the pass that repeats an interrupted one": (Change(TRAINING, SINCE_LATER), True),
    "from another state": (Change(None, RESTARTING), False),
    "from the same state, a second time": (
        Change(
            condition(ConditionType.TRAINED, "False", ConditionReason.TRAINING, since=later(60)), RESTARTING
        ),
        False,
    ),
    "with another message": (
        Change(TRAINING, condition(ConditionType.TRAINED, "False", ConditionReason.RESTARTING, "attempt 3")),
        False,
    ),
    "to another state": (Change(TRAINING, TRAINED), False),
}


@pytest.mark.parametrize(("change", "is_same"), OTHER_CHANGES.values(), ids=OTHER_CHANGES)
def test_an_event_about_the_same_change_has_the_same_name(change: Change, *, is_same: bool) -> None:
    first = events.build_event(ABOUT, Change(TRAINING, RESTARTING), NOW)
    second = events.build_event(ABOUT, change, later(30))
    assert (first["metadata"]["name"] == second["metadata"]["name"]) is is_same
