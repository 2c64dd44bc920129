"""Which events about a promotion are news."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.modelpromotion.enqueue import is_child, on_child, on_event
from finetune_operator.owners import build_owner_reference, find_owner

Json = dict[str, Any]
META: Json = {
    "namespace": "team",
    "name": "champion",
    "uid": "u1",
    "resourceVersion": "10",
    "generation": 1,
    "managedFields": [{"manager": "kubectl"}],
}
LATER = {"resourceVersion": "11"}


def promotion(meta: Json | None = None, **parts: Any) -> Json:
    """The ModelPromotion team/champion, of the model support."""
    spec = {"model": "support", "alias": "champion", "source": {"type": "Alias", "alias": "staging"}}
    return {"metadata": META | (meta or {}), "spec": spec, "status": {"phase": "Pending"}} | parts


def looked_at(store: Store, kind: str | None, body: Json) -> list[str]:
    """The promotions that an event puts on the queue, in this order."""
    queue = WorkQueue(clock=lambda: 0.0)
    on_event(store, queue, kind, body)
    return [key for key, is_routine in queue._queued.items() if not is_routine]


NEWS: dict[str, tuple[Json, bool]] = {
    "nothing": (promotion(), False),
    "its status": (promotion(LATER, status={"phase": "Promoted"}), False),
    "its first status": (promotion(LATER | {"managedFields": []}, status={"phase": "Promoted"}), False),
    "who wrote it": (promotion(LATER | {"managedFields": [{"manager": "argocd"}]}), False),
    "its spec": (promotion(LATER | {"generation": 2}, spec={"model": "other"}), True),
    "its spec, changed and changed back": (promotion(LATER | {"generation": 3}), True),
    "that it is being deleted": (promotion(LATER | {"deletionTimestamp": "2026-08-01T12:00:00Z"}), True),
    "a finalizer": (promotion(LATER | {"finalizers": ["finetune.dev/alias"]}), True),
    "a label": (promotion(LATER | {"labels": {"team": "a"}}), True),
    "an annotation": (promotion(LATER | {"annotations": {"note": "a"}}), True),
    "another of the same name": (promotion(LATER | {"uid": "u2"}), True),
}


@pytest.mark.parametrize(("body", "expected"), NEWS.values(), ids=NEWS)
@pytest.mark.parametrize("kind", ["MODIFIED", "ADDED", None])
def test_what_a_watch_says_of_a_promotion_that_is_known(kind: str | None, body: Json, expected: bool) -> None:
    store = Store()
    store.put("ModelPromotion", promotion())
    assert looked_at(store, kind, body) == (["team/champion"] if expected else [])
    assert store.promotions == {("team", "champion"): body}


def test_a_promotion_that_is_new() -> None:
    store = Store()
    assert looked_at(store, "ADDED", promotion()) == ["team/champion"]
    assert store.promotions == {("team", "champion"): promotion()}


def test_a_promotion_that_is_gone_is_news_to_those_of_its_model() -> None:
    store = Store()
    rival, resource = promotion({"name": "rival"}), promotion({"name": "other"}, spec={"model": "other"})
    model = promotion()["spec"]["model"].upper()
    in_capitals = promotion({"name": "capitals"}, spec={"model": model})
    for body in (promotion(), rival, resource, in_capitals):
        store.put("ModelPromotion", body)
    assert looked_at(store, "DELETED", promotion(LATER)) == [
        "team/capitals",
        "team/rival",
        "team/champion",
    ]
    assert set(store.promotions) == {("team", "rival"), ("team", "other"), ("team", "capitals")}


def test_a_status_of_a_promotion_that_names_no_model_is_no_news() -> None:
    spec = {"alias": "champion", "source": {"type": "Alias", "alias": "staging"}}
    store = Store()
    store.put("ModelPromotion", promotion(spec=spec))
    assert looked_at(store, "MODIFIED", promotion(LATER, spec=spec, status={"phase": "Promoted"})) == []
    assert store.promotions["team", "champion"]["spec"]["model"] == "champion"


def test_the_pod_of_a_gate_queues_the_promotion_that_its_annotation_names_unless_nobody_owns_it() -> None:
    store, queue = Store(find_owner), WorkQueue(clock=lambda: 0.0)
    meta = {
        "namespace": "team",
        "name": "champion-gate-1",
        "uid": "j1",
        "resourceVersion": "20",
        "annotations": {names.ANNOTATION_PROMOTION: "champion"},
    }
    forged: Json = {"metadata": meta}
    job = {
        "metadata": {**meta, "ownerReferences": [build_owner_reference("ModelPromotion", "champion", "u1")]}
    }
    assert is_child(forged)
    assert not is_child({"metadata": {**meta, "annotations": {}}})
    on_child(store, queue, "Job", "ADDED", forged)
    assert list(queue._queued) == []
    on_child(store, queue, "Job", "ADDED", job)
    assert list(queue._queued) == ["team/champion"]
    assert store.jobs_of(("team", "u1")) == [job]
    # What the operator wrote itself is no news.
    queue.drop("team/champion")
    known = WorkQueue(clock=lambda: 0.0)
    on_child(store, known, "Job", "ADDED", job)
    assert list(known._queued) == []
    on_child(store, known, "Job", "DELETED", job)
    assert list(known._queued) == ["team/champion"]
