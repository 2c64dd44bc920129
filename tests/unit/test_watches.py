"""What the liveness probe is told, and which events about a promotion are news."""

from __future__ import annotations

import time
from typing import Any

import pytest

from finetune_operator.store import Store
from finetune_operator.watches import Health, note_promotion
from finetune_operator.workqueue import Queues, WorkQueue

CASES: dict[str, tuple[float, float, float, str | None]] = {
    "all is well": (30, 20, 0, None),
    "a list that is a little late": (30, 329, 0, None),
    "a list that is far too late": (30, 331, 0, "the last resync was 331 s ago"),
    "lists that are rare by design": (3600, 3700, 0, None),
    "a key that waits a little": (30, 0, 299, None),
    "a key that no worker takes": (30, 0, 301, "a resource has waited 301 s for a worker"),
}


@pytest.mark.parametrize(("interval", "silent", "waited", "expected"), CASES.values(), ids=CASES)
def test_complaint(
    interval: float, silent: float, waited: float, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    queues = Queues(WorkQueue(clock=lambda: now), WorkQueue(clock=lambda: now))
    queues.promotions.add("team/champion")
    health = Health(queues, interval, last_resync=now + waited - silent)
    now += waited
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert health.complaint() == expected


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
    spec = {"model": "support", "alias": "champion", "source": {"alias": "staging"}}
    return {"metadata": META | (meta or {}), "spec": spec, "status": {"phase": "Pending"}} | parts


def looked_at(store: Store, kind: str | None, body: Json) -> list[str]:
    """The promotions that an event puts on the queue, in this order."""
    queues = Queues(WorkQueue(clock=lambda: 0.0), WorkQueue(clock=lambda: 0.0))
    note_promotion(store, queues, kind, body)
    assert len(queues.jobs) == 0
    return list(queues.promotions._ready)


NEWS: dict[str, tuple[Json, bool]] = {
    "nothing": (promotion(), False),
    "its status": (promotion(LATER, status={"phase": "Promoted"}), False),
    "its first status": (promotion(LATER | {"managedFields": []}, status={"phase": "Promoted"}), False),
    "who wrote it": (promotion(LATER | {"managedFields": [{"manager": "argocd"}]}), False),
    "its spec": (promotion(LATER | {"generation": 2}, spec={"model": "other"}), True),
    "its spec, to and fro": (promotion(LATER | {"generation": 3}), True),
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
    rival, other = promotion({"name": "rival"}), promotion({"name": "other"}, spec={"model": "other"})
    for body in (promotion(), rival, other):
        store.put("ModelPromotion", body)
    assert looked_at(store, "DELETED", promotion(LATER)) == ["team/rival", "team/champion"]
    assert set(store.promotions) == {("team", "rival"), ("team", "other")}
