"""What belongs to a FineTuneJob, and what an attempt sees of it."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetunejob import enqueue
from finetune_operator.finetunejob.children import (
    ComponentChildren,
    classify_children,
    find_loss_time,
    is_child,
    is_lost,
)
from finetune_operator.owners import Owner, find_owner
from fixtures.operator_in_memory.decisions import (
    NOW,
    UID,
    child,
    controller,
    deleted_at,
    ended,
    ftj,
    later,
    lost,
    on_unready_node,
    pod,
)

Json = dict[str, Any]
OWNED = controller(API_VERSION, "FineTuneJob", UID)


def test_a_child_is_in_the_namespace_of_its_job() -> None:
    body = {"metadata": {"name": "x", "namespace": "other", "ownerReferences": [OWNED]}}
    assert not is_child(body, ftj())
    assert is_child({"metadata": {**body["metadata"], "namespace": "team"}}, ftj())


def test_a_child_of_a_promotion_is_none_of_a_job() -> None:
    owner = controller(API_VERSION, "ModelPromotion", UID)
    assert not is_child({"metadata": {"name": "x", "namespace": "team", "ownerReferences": [owner]}}, ftj())


FOREIGN: dict[str, tuple[str, Json]] = {
    "a Job in the same namespace": ("Job", child("tune-train-1", "Complete", ownerReferences=[])),
    "a Job in another namespace": ("Job", child("tune-train-1", "Complete", namespace="other")),
    "a pod without a Job": ("Pod", pod("tune-train-1", owner="nobody")),
}


@pytest.mark.parametrize(("kind", "body"), FOREIGN.values(), ids=FOREIGN)
def test_labels_alone_make_no_child(kind: str, body: Json) -> None:
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    meta = body["metadata"]
    labels = {names.LABEL_JOB: "tune", names.LABEL_UID: UID}
    forged = {**body, "metadata": meta | {"labels": meta["labels"] | labels, "resourceVersion": "7"}}
    enqueue.on_child(store, queue, kind, "ADDED", forged)
    team = Owner("team", UID)
    assert (store.jobs_of(team), store.pods_of(team), store.tombstones(team)) == ([], [], [])
    if find_owner(kind, forged) is None:
        assert (store, len(queue)) == (Store(find_owner), 0)


FIRST, SECOND = child("tune-train-1"), child("tune-train-2")
OLD, DONE, NEW = pod("tune-train-1"), ended("tune-train-1", 1, 1), pod("tune-train-2")
ORPHAN = pod("tune-train-2", owner="uid-of-a-Job-that-is-gone")
DELETED, LOST = child("tune-train-1", deletionTimestamp="t"), lost(pod("tune-train-1", 1))
PREP = child("tune-prep")
SORTED: dict[str, tuple[list[Json], list[Json], ComponentChildren]] = {
    "nothing": ([], [], ComponentChildren(None, [], [], [], [])),
    "the attempt": ([SECOND], [NEW], ComponentChildren(SECOND, [NEW], [], [], [])),
    "an attempt that failed": (
        [child("tune-train-1", "Failed"), SECOND],
        [DONE, NEW],
        ComponentChildren(SECOND, [NEW], [], [], [child("tune-train-1", "Failed")]),
    ),
    "an attempt that failed and has a pod left": (
        [child("tune-train-1", "Failed")],
        [OLD],
        ComponentChildren(None, [], [], [OLD], [child("tune-train-1", "Failed")]),
    ),
    "an attempt that is still at work": (
        [FIRST, SECOND],
        [OLD, NEW],
        ComponentChildren(SECOND, [NEW], [FIRST], [OLD], []),
    ),
    "a pod of a Job that is gone": ([], [OLD], ComponentChildren(None, [], [], [OLD], [])),
    "a pod of an earlier Job of the same name": (
        [SECOND],
        [ORPHAN, NEW],
        ComponentChildren(SECOND, [NEW], [], [ORPHAN], []),
    ),
    "an attempt that is being deleted and has a lost pod": (
        [DELETED],
        [DONE, LOST],
        ComponentChildren(None, [], [], [], [], (DELETED,)),
    ),
    "an attempt that is being deleted and has a lost pod and another": (
        [DELETED],
        [OLD, LOST],
        ComponentChildren(None, [], [DELETED], [OLD], []),
    ),
    "an attempt that has a lost pod and is not being deleted yet": (
        [FIRST],
        [LOST],
        ComponentChildren(None, [], [FIRST], [], []),
    ),
    "a lost pod of the attempt": (
        [SECOND],
        [lost(NEW)],
        ComponentChildren(SECOND, [lost(NEW)], [], [], []),
    ),
    "the attempt, being deleted": (
        [child("tune-train-2", deletionTimestamp="t")],
        [NEW],
        ComponentChildren(None, [], [child("tune-train-2", deletionTimestamp="t")], [NEW], []),
    ),
    "the attempt, failed because it is deleted": (
        [child("tune-train-2", "Failed", deletionTimestamp="t")],
        [],
        ComponentChildren(None, [], [child("tune-train-2", "Failed", deletionTimestamp="t")], [], []),
    ),
    "the attempt, complete and then deleted": (
        [child("tune-train-2", "Complete", deletionTimestamp="t")],
        [],
        ComponentChildren(child("tune-train-2", "Complete", deletionTimestamp="t"), [], [], [], []),
    ),
    "the preparation": (
        [PREP],
        [pod("tune-prep", component=names.PREP)],
        ComponentChildren(None, [], [], [], []),
    ),
}


@pytest.mark.parametrize(("jobs", "pods", "expected"), SORTED.values(), ids=SORTED)
def test_an_attempt_sees_its_own_pods_ghosts_and_what_ended(
    jobs: list[Json], pods: list[Json], expected: ComponentChildren
) -> None:
    by_name = {item["metadata"]["name"]: item for item in jobs}
    assert classify_children(by_name, pods, names.TRAIN, "tune-train-2", NOW) == expected


POD, UNREADY = pod("tune-train-1"), on_unready_node(pod("tune-train-1"))
KUBELET_SAYS = [{"type": "ContainersReady", "status": "False"}]
# A pod, how many seconds after NOW it is looked at, and whether it is lost then.
LOSSES: dict[str, tuple[Json, float, bool]] = {
    "it runs": (POD, 0, False),
    "its node is not ready": (UNREADY, 1000, False),
    "it is being deleted": (deleted_at(0, POD), 100, False),
    "its node has not stopped it in time": (deleted_at(0, POD), 129, False),
    "its node has not stopped it long after": (deleted_at(0, POD), 130, True),
    "it has a short grace period": (deleted_at(0, POD, grace=0), 10, True),
    "it is evicted from a node that is not ready": (deleted_at(0, UNREADY), 0, True),
    "its containers are not ready, as its kubelet says": (
        deleted_at(0, pod("tune-train-1", ready=False, conditions=KUBELET_SAYS)),
        0,
        False,
    ),
    "a readiness gate is closed": (
        deleted_at(
            0,
            {
                **UNREADY,
                "status": {
                    "phase": "Running",
                    "conditions": [
                        {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"},
                        {"type": "ContainersReady", "status": "True"},
                    ],
                },
            },
        ),
        0,
        False,
    ),
    "it has ended": (deleted_at(0, ended("tune-train-1", 0, 143)), 1000, False),
}


@pytest.mark.parametrize(("body", "seconds", "expected"), LOSSES.values(), ids=LOSSES)
def test_a_pod_is_lost_that_nobody_will_stop(body: Json, seconds: float, expected: bool) -> None:
    assert is_lost(body, later(seconds)) == expected


def test_a_pod_that_is_being_deleted_counts_as_lost_soon_after_its_grace_period() -> None:
    assert find_loss_time(deleted_at(5, POD)) == later(135)
    assert find_loss_time(POD) is None
