"""The operator's copy of what exists: resource versions decide what is news."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.controller.store import Store

Json = dict[str, Any]


def ftj(version: int, name: str = "tune", uid: str = "u1", **more: Any) -> Json:
    return {
        "metadata": {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)},
        **more,
    }


def child(version: int, name: str = "tune-train-1", owner: str = "u1") -> Json:
    labels = {names.LABEL_UID: owner}
    return {
        "metadata": {"namespace": "team", "name": name, "labels": labels, "resourceVersion": str(version)}
    }


def held(store: Store) -> Json:
    """Name to version of everything that the store holds of FineTuneJobs and of the children of u1."""
    bodies = [*store.jobs.values(), *store.children("Job", "u1"), *store.children("Pod", "u1")]
    return {body["metadata"]["name"]: int(body["metadata"]["resourceVersion"]) for body in bodies}


Step = tuple[Any, ...]


def test_promotions_stand_apart_from_jobs_and_own_nothing() -> None:
    store = Store()
    store.put("ModelPromotion", ftj(1, "prod"))
    store.put("FineTuneJob", ftj(2))
    assert (list(store.promotions), list(store.jobs)) == ([("team", "prod")], [("team", "tune")])
    store.replace("ModelPromotion", [], 3)
    assert (list(store.promotions), list(store.jobs)) == ([], [("team", "tune")])


STORIES: dict[str, tuple[list[Step], Json]] = {
    "a newer state replaces an older one": (
        [("put", "FineTuneJob", ftj(1)), ("put", "FineTuneJob", ftj(2))],
        {"tune": 2},
    ),
    "an older state is ignored": (
        [("put", "FineTuneJob", ftj(2)), ("put", "FineTuneJob", ftj(1))],
        {"tune": 2},
    ),
    "an older state is ignored for children too": (
        [("put", "Job", child(5)), ("put", "Job", child(4))],
        {"tune-train-1": 5},
    ),
    "a job made again replaces the one before": (
        [("put", "FineTuneJob", ftj(1)), ("put", "FineTuneJob", ftj(3, uid="u2"))],
        {"tune": 3},
    ),
    "late news of the one before does not replace the job made again": (
        [("put", "FineTuneJob", ftj(3, uid="u2")), ("put", "FineTuneJob", ftj(2))],
        {"tune": 3},
    ),
    "what was deleted is gone": (
        [("put", "FineTuneJob", ftj(1)), ("drop", "FineTuneJob", ftj(2))],
        {},
    ),
    "late news does not bring back what was deleted": (
        [("put", "Job", child(1)), ("drop", "Job", child(3)), ("put", "Job", child(2))],
        {},
    ),
    "a late deletion does not take what was made again": (
        [("put", "Job", child(5)), ("drop", "Job", child(4))],
        {"tune-train-1": 5},
    ),
    "a list removes ghosts": (
        [("put", "Job", child(1)), ("put", "Pod", child(2, "pod")), ("replace", "Job", [], 9)],
        {"pod": 2},
    ),
    "a list does not remove what was made after it": (
        [("put", "Job", child(12)), ("replace", "Job", [], 10)],
        {"tune-train-1": 12},
    ),
    "a list does not undo a newer state": (
        [("put", "Job", child(12)), ("replace", "Job", [child(9)], 10)],
        {"tune-train-1": 12},
    ),
    "a list does not bring back what was deleted while it was under way": (
        [("put", "Job", child(9)), ("drop", "Job", child(12)), ("replace", "Job", [child(9)], 10)],
        {},
    ),
    "a list brings what the watch missed, however old": (
        [("replace", "Job", [], 10), ("replace", "Job", [child(3)], 20)],
        {"tune-train-1": 3},
    ),
    "late news of what a list did not have is ignored": (
        [("replace", "Job", [], 10), ("put", "Job", child(9))],
        {},
    ),
    "news after a list counts": (
        [("replace", "Job", [], 10), ("put", "Job", child(11))],
        {"tune-train-1": 11},
    ),
}


@pytest.mark.parametrize(("steps", "expected"), STORIES.values(), ids=STORIES)
def test_story(steps: list[Step], expected: Json) -> None:
    store = Store()
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    assert held(store) == expected


def test_children_are_those_of_one_job_by_name() -> None:
    store = Store()
    for name, owner in (("b", "u1"), ("a", "u1"), ("c", "u2")):
        store.put("Job", child(1, name, owner))
    assert [body["metadata"]["name"] for body in store.children("Job", "u1")] == ["a", "b"]
    assert store.children("Pod", "u1") == store.children("Job", "nobody") == []


def test_nothing_is_kept_of_jobs_that_are_gone() -> None:
    store = Store()
    store.put("FineTuneJob", ftj(1))
    for kind in ("Job", "Pod"):
        store.put(kind, child(2))
    store.drop("FineTuneJob", ftj(3))
    for kind in ("Job", "Pod"):
        store.drop(kind, child(4))
        store.replace(kind, [], 5)
    for kind in ("FineTuneJob", "ModelPromotion"):
        store.replace(kind, [], 5)
    empty = Store()
    empty._listed = dict.fromkeys(empty._listed, 5)
    assert store == empty


def job(version: int) -> Json:
    body = child(version)
    body["metadata"]["uid"] = "j1"
    return body


def pod(version: int, phase: str) -> Json:
    body = child(version, "tune-train-1-0-x")
    body["metadata"]["labels"][names.LABEL_CONTROLLER] = "j1"
    return {**body, "status": {"phase": phase}}


FALLEN: dict[str, tuple[list[Step], list[int]]] = {
    "failed, and deleted": ([("put", "Pod", pod(2, "Running")), ("drop", "Pod", pod(4, "Failed"))], [4]),
    "failed, and missing in a list": ([("put", "Pod", pod(2, "Failed")), ("replace", "Pod", [], 5)], [2]),
    "deleted while it ran": ([("drop", "Pod", pod(4, "Running"))], []),
    "done, and deleted": ([("drop", "Pod", pod(4, "Succeeded"))], []),
    "failed, and still there": ([("put", "Pod", pod(4, "Failed"))], []),
    "gone with its Job": ([("drop", "Pod", pod(4, "Failed")), ("drop", "Job", job(5))], []),
    "gone with its Job, as a list says": (
        [("drop", "Pod", pod(4, "Failed")), ("replace", "Job", [], 6), ("put", "Job", job(7))],
        [],
    ),
    "gone after its Job": ([("drop", "Job", job(5)), ("drop", "Pod", pod(6, "Failed"))], []),
    "its Job changed since": ([("drop", "Pod", pod(4, "Failed")), ("put", "Job", job(5))], [4]),
}


@pytest.mark.parametrize(("steps", "expected"), FALLEN.values(), ids=FALLEN)
def test_a_pod_that_failed_and_is_gone_is_remembered_with_its_job(
    steps: list[Step], expected: list[int]
) -> None:
    store = Store()
    store.put("Job", job(1))
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    assert [int(body["metadata"]["resourceVersion"]) for body in store.tombstones("u1")] == expected
    live = {body["metadata"]["name"] for body in store.children("Pod", "u1")}
    assert ("tune-train-1-0-x" in live) == (steps == [("put", "Pod", pod(4, "Failed"))])


def test_managed_fields_are_left_out_and_the_callers_object_is_untouched() -> None:
    body = ftj(1, status={"phase": "Training"})
    body["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    store = Store()
    store.put("FineTuneJob", body)
    assert store.jobs["team", "tune"] == ftj(1, status={"phase": "Training"})
    assert "managedFields" in body["metadata"]
