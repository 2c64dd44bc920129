"""The decision while it is being made."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import Reason, Type
from finetune_operator.children import job_ended
from finetune_operator.decide.draft import Draft
from finetune_operator.model import Deletion
from unit.decide.make import NOW, SETTINGS, child, condition, job, later, observed, status


def draft(*jobs: dict[str, object], seconds: float = 0) -> Draft:
    before = status(
        condition(Type.ACCEPTED, "True", Reason.ACCEPTED), condition(Type.PREPARED, "False", Reason.PREPARING)
    )
    return Draft(job(before), observed(*jobs), later(seconds), SETTINGS)


def test_a_condition_keeps_its_place_and_its_time_until_its_status_changes() -> None:
    found = draft(seconds=60)
    found.set(Type.ACCEPTED, True, Reason.ACCEPTED, "other words")
    found.set(Type.PREPARED, True, Reason.PREPARED, "done")
    found.set(Type.TRAINED, None, Reason.STARTING, "soon")
    assert found.status.conditions == [
        condition(Type.ACCEPTED, "True", Reason.ACCEPTED, "other words", since=NOW),
        condition(Type.PREPARED, "True", Reason.PREPARED, "done", since=later(60)),
        condition(Type.TRAINED, "Unknown", Reason.STARTING, "soon", since=later(60)),
    ]
    assert found.holds(Type.PREPARED)
    assert not found.holds(Type.TRAINED)
    assert not found.holds(Type.FAILED)


def test_a_message_is_cut_to_what_the_schema_allows() -> None:
    found = draft()
    found.set(Type.FAILED, True, Reason.DATA_WRONG, "x" * 40000)
    failed = found.condition(Type.FAILED)
    assert failed is not None
    assert len(failed.message) == 32768


def test_the_earliest_look_counts() -> None:
    found = draft()
    for seconds in (30.0, 5.0, 60.0, 0.0, 10.0):
        found.look_again(seconds)
    assert found.conclude().requeue_seconds == 0.0


def test_children_are_deleted_once_and_by_their_uid() -> None:
    going = child("going", deletionTimestamp=NOW.isoformat())
    found = draft(child("a", uid="u-a"), child("b", "Complete"), child("c", "Failed"), going)
    found.stop_children()
    found.stop_children()
    assert found.conclude().delete == (Deletion("a", "u-a"),)


@pytest.mark.parametrize(
    ("kind", "expected"), [("", False), ("FailureTarget", False), ("Complete", True), ("Failed", True)]
)
def test_job_ended(kind: str, expected: bool) -> None:
    assert job_ended(child("a", kind)) is expected


def test_a_spec_that_was_not_accepted_cannot_be_read() -> None:
    import dataclasses

    found = Draft(dataclasses.replace(job(), spec=None), observed(), NOW, SETTINGS)
    with pytest.raises(ValueError, match="the spec of team/tune was not accepted"):
        _ = found.spec
