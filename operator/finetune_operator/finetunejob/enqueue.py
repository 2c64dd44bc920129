"""Puts FineTuneJobs on the queue when an event concerns them."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetunejob.children import find_owner

# Pods of a gang change together: so that their events cause one pass, not one pass each.
_CHILD_EVENT_SECONDS = 0.1


def on_event(store: Store, queue: WorkQueue, kind: str | None, body: Json) -> None:
    """Store a FineTuneJob that a watch delivers, and queue a pass unless the operator itself wrote this state."""
    is_news = kind == "DELETED" or not store.has("FineTuneJob", body)
    _update_store(store, "FineTuneJob", kind, body)
    if is_news:
        queue.add(f"{body['metadata']['namespace']}/{body['metadata']['name']}")


def on_child(store: Store, queue: WorkQueue, child: str, kind: str | None, body: Json) -> None:
    """Store a child that a watch delivers, and queue a pass over the FineTuneJob that its label names."""
    is_news = kind == "DELETED" or not store.has(child, body)
    _update_store(store, child, kind, body)
    meta = body["metadata"]
    if is_news and find_owner(child, body):
        queue.add_after(f"{meta['namespace']}/{meta['labels'].get(names.LABEL_JOB)}", _CHILD_EVENT_SECONDS)


def _update_store(store: Store, resource: str, kind: str | None, body: Json) -> None:
    if kind == "DELETED":
        store.drop(resource, body)
    else:
        store.put(resource, body)
