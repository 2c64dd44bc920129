"""The decision while it is being made."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import Progress
from finetune_operator.batch.state import has_ended
from finetune_operator.finetunejob.decision import Deletion
from finetune_operator.finetunejob.draft.draft import Draft
from fixtures.operator_in_memory.decisions import (
    NOW,
    SETTINGS,
    child,
    condition,
    ftj,
    later,
    observed,
    running,
    status,
)


def draft(*jobs: dict[str, object], seconds: float = 0) -> Draft:
    before = status(
        condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED),
        condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING),
    )
    return Draft(ftj(before), observed(*jobs), later(seconds), SETTINGS)


def test_a_condition_keeps_its_place_and_its_time_until_its_status_changes() -> None:
    pass_draft = draft(seconds=60)
    pass_draft.set(ConditionType.ACCEPTED, True, ConditionReason.ACCEPTED, "other words")
    pass_draft.set(ConditionType.PREPARED, True, ConditionReason.PREPARED, "done")
    pass_draft.set(ConditionType.TRAINED, None, ConditionReason.STARTING, "soon")
    assert pass_draft.status.conditions == [
        condition(ConditionType.ACCEPTED, "True", ConditionReason.ACCEPTED, "other words", since=NOW),
        condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED, "done", since=later(60)),
        condition(ConditionType.TRAINED, "Unknown", ConditionReason.STARTING, "soon", since=later(60)),
    ]
    assert pass_draft.holds(ConditionType.PREPARED)
    assert not pass_draft.holds(ConditionType.TRAINED)
    assert not pass_draft.holds(ConditionType.FAILED)


def test_a_message_is_cut_to_what_the_schema_allows() -> None:
    pass_draft = draft()
    pass_draft.set(ConditionType.FAILED, True, ConditionReason.DATA_WRONG, "x" * 40000)
    failed = pass_draft.condition(ConditionType.FAILED)
    assert failed is not None
    assert len(failed.message) == 32768


def test_the_earliest_look_counts() -> None:
    pass_draft = draft()
    for seconds in (30.0, 5.0, 60.0, 0.0, 10.0):
        pass_draft.requeue_after(seconds)
    assert pass_draft.conclude().requeue_seconds == 0.0


@pytest.mark.parametrize(("seconds", "poll_seconds"), [(0, 5), (20, 5), (40, 10), (240, 60), (9000, 60)])
def test_a_job_that_does_not_change_is_looked_at_less_often(seconds: float, poll_seconds: float) -> None:
    pass_draft = draft(seconds=seconds)
    pass_draft.poll()
    assert pass_draft.conclude().requeue_seconds == poll_seconds


def test_progress_is_a_change() -> None:
    before = running(progress=Progress(step=5, update_time=later(200)))
    pass_draft = Draft(ftj(before), observed(), later(240), SETTINGS)
    pass_draft.poll()
    assert pass_draft.conclude().requeue_seconds == 10


def test_children_are_deleted_once_and_by_their_uid() -> None:
    job_body = child("going", deletionTimestamp=NOW.isoformat())
    pass_draft = draft(child("a", uid="u-a"), child("b", "Complete"), child("c", "Failed"), job_body)
    pass_draft.stop_children()
    pass_draft.stop_children()
    assert pass_draft.conclude().delete == (Deletion("a", "u-a"),)


@pytest.mark.parametrize(
    ("kind", "expected"), [("", False), ("FailureTarget", False), ("Complete", True), ("Failed", True)]
)
def test_job_ended(kind: str, expected: bool) -> None:
    assert has_ended(child("a", kind)) is expected


def test_a_spec_that_was_not_accepted_cannot_be_read() -> None:
    import dataclasses

    pass_draft = Draft(dataclasses.replace(ftj(), spec=None), observed(), NOW, SETTINGS)
    with pytest.raises(ValueError, match="the spec of team/tune was not accepted"):
        _ = pass_draft.spec
