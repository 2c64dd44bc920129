"""Which events about a job and its children cause a pass, and when."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetunejob.enqueue import on_child, on_event
from finetune_operator.owners import find_owner
from fixtures.operator_in_memory.decisions import UID, child, controller

Json = dict[str, Any]


def version(body: Json, number: int, **meta: Any) -> Json:
    """An object at a version, with the labels of a child."""
    labels = {names.LABEL_JOB: "tune", names.LABEL_UID: UID}
    return {
        **body,
        "metadata": {**body["metadata"], "labels": labels, "resourceVersion": str(number), **meta},
    }


TUNE: Json = {"metadata": {"namespace": "team", "name": "tune", "uid": UID}}
JOB = child("tune-train-1")
EVENTS: dict[str, tuple[str, Json, bool]] = {
    "a change": ("MODIFIED", version(TUNE, 6), True),
    "what the operator wrote": ("MODIFIED", version(TUNE, 5), False),
    "an earlier state": ("MODIFIED", version(TUNE, 4), False),
    "another of the name": ("ADDED", version(TUNE, 5, uid="other"), True),
    "the end": ("DELETED", version(TUNE, 6), True),
}


@pytest.mark.parametrize(("change", "body", "is_news"), EVENTS.values(), ids=EVENTS)
def test_a_change_of_a_job_is_looked_at_at_once(change: str, body: Json, *, is_news: bool) -> None:
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    store.put("FineTuneJob", version(TUNE, 5))
    on_event(store, queue, change, body)
    assert (queue._queued, queue._due) == ({"team/tune": False} if is_news else {}, {})


def test_a_change_of_a_trial_is_looked_at_with_its_sweep() -> None:
    owner = controller("finetune.dev/v1alpha1", "FineTuneJob", UID)
    trial = {"metadata": {"namespace": "team", "name": "tune-1", "uid": "u", "ownerReferences": [owner]}}
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    on_event(store, queue, "MODIFIED", version(trial, 5))
    assert (queue._queued, queue._due) == ({"team/tune-1": False}, {"team/its-name": (0.1, False)})
    # The operator itself wrote the status of the trial: that is no news of the trial, but of its sweep.
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    store.put("FineTuneJob", version(trial, 5))
    on_event(store, queue, "MODIFIED", version(trial, 5))
    assert (queue._queued, queue._due) == ({}, {"team/its-name": (0.1, False)})


CHILD_EVENTS: dict[str, tuple[str, Json, bool]] = {
    "a change": ("MODIFIED", version(JOB, 6), True),
    "what the operator created": ("ADDED", version(JOB, 5), False),
    "its deletion": ("DELETED", version(JOB, 6), True),
}


@pytest.mark.parametrize(("change", "body", "is_news"), CHILD_EVENTS.values(), ids=CHILD_EVENTS)
def test_changes_of_children_are_looked_at_together(change: str, body: Json, *, is_news: bool) -> None:
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    store.put("Job", version(JOB, 5))
    for _ in range(2):
        on_child(store, queue, "Job", change, body)
    assert (queue._queued, queue._due) == ({}, {"team/tune": (0.1, False)} if is_news else {})
