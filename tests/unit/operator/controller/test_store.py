"""The operator's copy of what exists: resource versions decide what is news."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.controller.store import KINDS, Store
from finetune_operator.owners import build_owner_reference

Json = dict[str, Any]


def ftj(version: int, name: str = "tune", uid: str = "u1", **more: Any) -> Json:
    return {
        "metadata": {"namespace": "team", "name": name, "uid": uid, "resourceVersion": str(version)},
        **more,
    }


FTJ = ("team", "u1")


def owner_of(kind: str, body: Json) -> tuple[str, str] | None:
    """Of these objects: what their `owner` says."""
    owner = body["metadata"].get("owner")
    return (body["metadata"]["namespace"], owner) if owner else None


def recorded_jobs(body: Json) -> set[tuple[str, str]]:
    """The Jobs of this FineTuneJob: what its `jobs` says."""
    return {(body["metadata"]["namespace"], uid) for uid in body.get("jobs", [])}


def child(version: int, name: str = "tune-train-1", owner: str | None = "u1", uid: str = "j1") -> Json:
    meta = {"namespace": "team", "name": name, "uid": uid, "owner": owner, "resourceVersion": str(version)}
    return {"metadata": meta}


def pod(version: int, phase: str = "Running", owner: str | None = "j1", name: str = "pod") -> Json:
    return {**child(version, name, owner, uid=f"uid-of-{name}"), "status": {"phase": phase}}


def held(store: Store) -> Json:
    """Name to version of everything that the store holds of FineTuneJobs and of the children of u1."""
    bodies = [*store.of("FineTuneJob").values(), *store.jobs_of(FTJ), *store.pods_of(FTJ)]
    return {body["metadata"]["name"]: int(body["metadata"]["resourceVersion"]) for body in bodies}


Step = tuple[Any, ...]


@pytest.mark.parametrize("kind", ["FineTuneSchedule", "FineTuneJob"])
def test_a_schedule_or_a_sweep_finds_its_jobs_as_they_are_now(kind: str) -> None:
    def created_by(version: int, name: str, owner: str) -> Json:
        body = ftj(version, name, uid=name)
        body["metadata"]["ownerReferences"] = [build_owner_reference(kind, "nightly", owner)]
        return body

    def names_of(owner: str) -> list[str]:
        return [body["metadata"]["name"] for body in store.finetunejobs_of(("team", owner))]

    store = Store()
    for body in (ftj(1), created_by(2, "b", "s1"), created_by(3, "a", "s1"), created_by(4, "c", "s2")):
        store.put("FineTuneJob", body)
    assert (names_of("s1"), names_of("s2"), names_of("s3")) == (["a", "b"], ["c"], [])
    # Another one adopts one, one is deleted, and one was deleted while no watch ran.
    store.put("FineTuneJob", created_by(5, "a", "s2"))
    store.drop("FineTuneJob", created_by(6, "b", "s1"))
    store.replace("FineTuneJob", [created_by(5, "a", "s2")], 7)
    assert (names_of("s1"), names_of("s2")) == ([], ["a"])
    assert store._created_jobs == {("team", "s2"): {("team", "a")}}


def test_promotions_stand_apart_from_jobs_and_own_nothing() -> None:
    store = Store()
    store.put("ModelPromotion", ftj(1, "prod"))
    store.put("FineTuneJob", ftj(2))
    assert (list(store.promotions), list(store.of("FineTuneJob"))) == ([("team", "prod")], [("team", "tune")])
    store.replace("ModelPromotion", [], 3)
    assert (list(store.promotions), list(store.of("FineTuneJob"))) == ([], [("team", "tune")])


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
        [("put", "Job", child(1)), ("put", "Pod", pod(2)), ("replace", "Job", [], 9)],
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
    "a pod is known when its Job comes later": (
        [("put", "Pod", pod(4)), ("put", "Job", child(3))],
        {"pod": 4, "tune-train-1": 3},
    ),
    "a pod outlives its Job": (
        [("put", "Job", child(3)), ("put", "Pod", pod(4)), ("drop", "Job", child(5))],
        {"pod": 4},
    ),
    "a pod may come after its Job is gone": (
        [("put", "Job", child(3)), ("drop", "Job", child(6)), ("put", "Pod", pod(4))],
        {"pod": 4},
    ),
    "a pod outlives its Job in lists": (
        [
            ("put", "Job", child(3)),
            ("put", "Pod", pod(4)),
            ("replace", "Job", [], 9),
            ("replace", "Pod", [pod(4)], 10),
            ("replace", "FineTuneJob", [ftj(2)], 11),
        ],
        {"pod": 4, "tune": 2},
    ),
    "after a restart, a pod outlives the Job that its FineTuneJob records": (
        [
            ("replace", "Job", [], 9),
            ("replace", "Pod", [pod(4)], 10),
            ("replace", "FineTuneJob", [ftj(2, jobs=["j1"])], 11),
        ],
        {"pod": 4, "tune": 2},
    ),
    "a pod that comes after its Job is gone belongs to the FineTuneJob that records the Job": (
        [("replace", "Job", [], 9), ("put", "FineTuneJob", ftj(2, jobs=["j1"])), ("put", "Pod", pod(4))],
        {"pod": 4, "tune": 2},
    ),
    "a Job that a FineTuneJob no longer records is forgotten": (
        [
            ("put", "FineTuneJob", ftj(2, jobs=["j1"])),
            ("put", "Pod", pod(4)),
            ("put", "FineTuneJob", ftj(5, jobs=["j2"])),
        ],
        {"tune": 5},
    ),
    "a FineTuneJob made again does not have the Jobs that the one before recorded": (
        [
            ("put", "FineTuneJob", ftj(2, jobs=["j1"])),
            ("put", "Pod", pod(4)),
            ("put", "FineTuneJob", ftj(5, uid="u2")),
        ],
        {"tune": 5},
    ),
    "a pod of an earlier Job of the same name is known too": (
        [
            ("put", "Job", child(3)),
            ("put", "Pod", pod(4)),
            ("put", "Job", child(7, uid="j2")),
            ("put", "Pod", pod(8, owner="j2", name="newer")),
        ],
        {"pod": 4, "newer": 8, "tune-train-1": 7},
    ),
    "a foreign child is not kept": (
        [("put", "Job", child(3, owner=None)), ("replace", "Pod", [pod(4, owner=None)], 5)],
        {},
    ),
    "a child that loses its owner is not kept": (
        [("put", "Job", child(3)), ("put", "Job", child(4, owner=None))],
        {},
    ),
    "an older state does not take the owner away": (
        [("put", "Job", child(3)), ("put", "Job", child(2, owner=None))],
        {"tune-train-1": 3},
    ),
    "news after a list counts": (
        [("replace", "Job", [], 10), ("put", "Job", child(11))],
        {"tune-train-1": 11},
    ),
}


@pytest.mark.parametrize(("steps", "expected"), STORIES.values(), ids=STORIES)
def test_story(steps: list[Step], expected: Json) -> None:
    store = Store(owner_of, recorded_jobs)
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    assert held(store) == expected


def test_children_are_those_of_one_job_by_name() -> None:
    store = Store(owner_of, recorded_jobs)
    for name, owner in (("b", "u1"), ("a", "u1"), ("c", "u2")):
        store.put("Job", child(1, name, owner, uid=f"uid-of-{name}"))
        store.put("Pod", pod(2, owner=f"uid-of-{name}", name=f"{name}-0"))
    assert [body["metadata"]["name"] for body in store.jobs_of(FTJ)] == ["a", "b"]
    assert [body["metadata"]["name"] for body in store.pods_of(FTJ)] == ["a-0", "b-0"]
    assert store.jobs_of(("team", "nobody")) == store.pods_of(("other", "u1")) == []


def test_nothing_is_kept_of_jobs_that_are_gone() -> None:
    store = Store(owner_of, recorded_jobs)
    store.put("FineTuneJob", ftj(1, jobs=["j1"]))
    store.put("Job", child(2))
    store.put("Pod", pod(2))
    store.drop("FineTuneJob", ftj(3, jobs=["j1"]))
    store.drop("Job", child(4))
    store.drop("Pod", pod(4))
    for kind in KINDS:
        store.replace(kind, [], 5)
    empty = Store(owner_of, recorded_jobs)
    empty._list_versions = dict.fromkeys(empty._list_versions, 5)
    assert store == empty


def test_nothing_is_kept_of_foreign_objects() -> None:
    """Neither of those without an owner, nor of those that name one which is not there."""
    store = Store(owner_of, recorded_jobs)
    store.drop("Job", child(2, owner=None))
    store.drop("Pod", pod(2, owner=None))
    store.put("Job", child(3))
    store.put("Pod", pod(4, owner="j9"))
    for _ in range(2):
        store.replace("Job", [child(3)], 5)
        store.replace("Pod", [pod(4, owner="j9")], 6)
        store.replace("FineTuneJob", [], 7)
        store.replace("ModelPromotion", [], 8)
    assert [store.of(kind) for kind in ("Job", "Pod")] == [{}, {}]
    assert store._deletions["Job"] == store._deletions["Pod"] == {}


def test_children_are_listed_before_what_owns_them_and_stay() -> None:
    """A Job made after the list of Jobs, and its pod, which the list of Pods has already."""
    store = Store(owner_of, recorded_jobs)
    store.replace("Job", [], 5)
    store.replace("Pod", [pod(8)], 9)
    store.replace("FineTuneJob", [ftj(2)], 10)
    store.put("Job", child(7))
    assert held(store) == {"tune": 2, "tune-train-1": 7, "pod": 8}


def test_the_job_of_a_promotion_stays_as_long_as_the_promotion() -> None:
    store = Store(owner_of, recorded_jobs)
    for promotions, expected in (([ftj(2, "champion", "p1")], ["champion-gate-1"]), ([], [])):
        store.replace("Job", [child(3, "champion-gate-1", "p1")], 5)
        store.replace("FineTuneJob", [], 7)
        store.replace("ModelPromotion", promotions, 8)
        assert [body["metadata"]["name"] for body in store.jobs_of(("team", "p1"))] == expected


TOMBSTONES: dict[str, tuple[list[Step], list[int]]] = {
    "failed, and deleted": ([("put", "Pod", pod(2, "Running")), ("drop", "Pod", pod(4, "Failed"))], [4]),
    "failed, and missing in a list": ([("put", "Pod", pod(2, "Failed")), ("replace", "Pod", [], 5)], [2]),
    "deleted while it ran": ([("drop", "Pod", pod(4, "Running"))], []),
    "done, and deleted": ([("drop", "Pod", pod(4, "Succeeded"))], [4]),
    "failed, and still there": ([("put", "Pod", pod(4, "Failed"))], []),
    "gone with its Job": ([("drop", "Pod", pod(4, "Failed")), ("drop", "Job", child(5))], []),
    "gone with its Job, as a list says": (
        [("drop", "Pod", pod(4, "Failed")), ("replace", "Job", [], 6), ("put", "Job", child(7))],
        [],
    ),
    "gone after its Job": ([("drop", "Job", child(5)), ("drop", "Pod", pod(6, "Failed"))], []),
    "its Job changed since": ([("drop", "Pod", pod(4, "Failed")), ("put", "Job", child(5))], [4]),
}


@pytest.mark.parametrize(("steps", "expected"), TOMBSTONES.values(), ids=TOMBSTONES)
def test_a_pod_that_ended_and_is_gone_is_remembered_with_its_job(
    steps: list[Step], expected: list[int]
) -> None:
    store = Store(owner_of, recorded_jobs)
    store.put("Job", child(1))
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    assert [int(body["metadata"]["resourceVersion"]) for body in store.tombstones(FTJ)] == expected
    live = {body["metadata"]["name"] for body in store.pods_of(FTJ)}
    assert ("pod" in live) == (steps == [("put", "Pod", pod(4, "Failed"))])


def indexed(version: int, name: str, index: int) -> Json:
    """A failed pod of an Indexed Job."""
    body = pod(version, "Failed", name=name)
    body["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
    return body


def test_of_the_pods_of_a_job_that_is_stopped_and_resumed_the_last_of_each_index_is_remembered() -> None:
    store = Store(owner_of, recorded_jobs)
    store.put("Job", child(1))
    for count in range(5):
        for index in (0, 1):
            store.drop("Pod", indexed(10 + count, f"pod-{index}-{count}", index))
    assert [body["metadata"]["name"] for body in store.tombstones(FTJ)] == ["pod-0-4", "pod-1-4"]


def stopping(version: int, phase: str, at: str, grace: int, uid: str = "uid-of-pod") -> Json:
    """A pod whose deletion was requested."""
    body = pod(version, phase)
    body["metadata"] |= {"uid": uid, "deletionTimestamp": at, "deletionGracePeriodSeconds": grace}
    return body


REQUEST, SECOND_REQUEST = ("12:02:00", 120), ("12:00:09", 0)
DELETIONS: dict[str, tuple[list[Step], tuple[str, int]]] = {
    "by the kubelet once its containers have ended": (
        [
            ("put", "Pod", stopping(2, "Running", *REQUEST)),
            ("put", "Pod", stopping(3, "Failed", *SECOND_REQUEST)),
        ],
        REQUEST,
    ),
    "as the watch reports its end": (
        [
            ("put", "Pod", stopping(2, "Running", *REQUEST)),
            ("drop", "Pod", stopping(3, "Failed", *SECOND_REQUEST)),
        ],
        REQUEST,
    ),
    "of another pod of the name": (
        [
            ("put", "Pod", stopping(2, "Running", *REQUEST)),
            ("put", "Pod", stopping(3, "Failed", *SECOND_REQUEST, uid="other")),
        ],
        SECOND_REQUEST,
    ),
}


@pytest.mark.parametrize(("steps", "expected"), DELETIONS.values(), ids=DELETIONS)
def test_the_first_request_to_delete_a_pod_counts(steps: list[Step], expected: tuple[str, int]) -> None:
    store = Store(owner_of, recorded_jobs)
    store.put("Job", child(1))
    for name, *arguments in steps:
        getattr(store, name)(*arguments)
    (body,) = [*store.pods_of(FTJ), *store.tombstones(FTJ)]
    meta = body["metadata"]
    assert (meta["deletionTimestamp"], meta["deletionGracePeriodSeconds"]) == expected


def test_managed_fields_are_left_out_and_the_callers_object_is_untouched() -> None:
    body = ftj(1, status={"phase": "Training"})
    body["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    store = Store()
    store.put("FineTuneJob", body)
    assert store.of("FineTuneJob")["team", "tune"] == ftj(1, status={"phase": "Training"})
    assert "managedFields" in body["metadata"]


def test_of_services_and_config_maps_only_the_metadata_is_kept() -> None:
    store = Store(owner_of, recorded_jobs)
    store.put("ConfigMap", {**child(2, "tune-train"), "data": {"recipe.yaml": "a: 1"}})
    store.put("Service", {**child(3, "tune"), "spec": {"clusterIP": "None"}})
    store.put("Service", child(4, "foreign", owner=None))
    assert store.companions_of(FTJ) == {("ConfigMap", "tune-train"), ("Service", "tune")}
    assert [*store.of("ConfigMap").values(), *store.of("Service").values()] == [
        child(2, "tune-train"),
        child(3, "tune"),
    ]
    store.drop("Service", child(5, "tune"))
    store.put("Service", child(3, "tune"))
    assert store.companions_of(FTJ) == {("ConfigMap", "tune-train")}
    store.replace("ConfigMap", [], 6)
    assert store.companions_of(FTJ) == frozenset()
