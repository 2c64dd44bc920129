"""Puts FineTuneJobs on the queue when a watch delivers an event about them or their children.

`event_type` is the type of a watch event; None for an object of the list with which a watch starts.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.owners import find_controller, find_finetunejob, find_owner

# The pods of a gang change together. After this delay, one pass handles the events of all of them.
_CHILD_EVENT_SECONDS = 0.1


def on_event(store: Store, queue: WorkQueue, event_type: str | None, body: Json) -> None:
    """Store a FineTuneJob that a watch delivers, and queue a pass over it unless the operator itself wrote this state.

    A pass over its sweep follows in any case: a pass over a trial writes the status that the sweep reads.
    """
    if store.update("FineTuneJob", event_type, body):
        queue.add(f"{body['metadata']['namespace']}/{body['metadata']['name']}")
    sweep, reference = find_finetunejob(body), find_controller(body)
    if sweep and reference:
        queue.add_after(f"{sweep.namespace}/{reference['name']}", _CHILD_EVENT_SECONDS)


def on_child(store: Store, queue: WorkQueue, kind: str, event_type: str | None, body: Json) -> None:
    """Store a child that a watch delivers, and queue a pass over the FineTuneJob that its label names.

    An object without an owner is no child, and a state that the operator itself wrote is no news: neither causes a pass.
    """
    is_news = store.update(kind, event_type, body)
    meta = body["metadata"]
    if is_news and find_owner(kind, body):
        queue.add_after(f"{meta['namespace']}/{meta['labels'].get(names.LABEL_JOB)}", _CHILD_EVENT_SECONDS)
