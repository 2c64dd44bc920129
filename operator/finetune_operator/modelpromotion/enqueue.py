"""Puts ModelPromotions on the queue when an event concerns them."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue

# Fields of the metadata that every write changes, also a write of the status.
_CHANGED_BY_EVERY_WRITE = ("resourceVersion", "managedFields")


def on_event(store: Store, queue: WorkQueue, event_type: str | None, body: Json) -> None:
    """Store a ModelPromotion from a watch, and queue a pass unless only its status changed.

    NB: the operator writes the status itself. A pass for each of its own writes would bypass the backoff after a failure
    whose message differs each time.
    """
    meta = body["metadata"]
    key = f"{meta['namespace']}/{meta['name']}"
    if event_type == "DELETED":
        store.drop("ModelPromotion", body)
        # Another promotion may manage the alias now.
        on_model(store, queue, body["spec"].get("model") or meta["name"])
        # The pass for the deleted promotion finds no resource, and clears the key's backoff.
        queue.add(key)
        return
    store_key = (meta["namespace"], meta["name"])
    before = store.promotions.get(store_key)
    store.put("ModelPromotion", body)
    # NB: the store fills in the model that the spec leaves out, so compare the body as it was stored.
    if before is None or _without_status(before) != _without_status(store.promotions[store_key]):
        queue.add(key)


def on_child(store: Store, queue: WorkQueue, kind: str, event_type: str | None, body: Json) -> None:
    """Store a Job of a gate, or a pod of one, from a watch, and queue a pass over the promotion that its annotation names.

    An object without an owner is no child, and a state that the operator itself wrote is no news: neither causes a pass.
    """
    if store.update(kind, event_type, body) and store.owner_of(kind, body):
        meta = body["metadata"]
        queue.add(f"{meta['namespace']}/{meta['annotations'][names.ANNOTATION_PROMOTION]}")


def is_child(body: Json) -> bool:
    """Whether an object says that it is the Job of a gate, or a pod of one."""
    return names.ANNOTATION_PROMOTION in (body["metadata"].get("annotations") or {})


def on_finetunejob(store: Store, queue: WorkQueue, namespace: str, name: str) -> None:
    """Queue the promotions that take their version from a FineTuneJob."""
    for key in store.promotion_index.of_job(namespace, name):
        queue.add("/".join(key))


def on_model(store: Store, queue: WorkQueue, model: str | None) -> None:
    """Queue the promotions of a registered model, with its name in any case."""
    for key in store.promotion_index.of_model(str(model)):
        queue.add("/".join(key))


def _without_status(body: Json) -> tuple[Json, object]:
    """A promotion's metadata and spec, without the metadata that every write changes."""
    meta = {name: value for name, value in body["metadata"].items() if name not in _CHANGED_BY_EVERY_WRITE}
    return meta, body.get("spec")
