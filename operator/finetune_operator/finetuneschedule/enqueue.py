"""Puts FineTuneSchedules on the queue when an event concerns them."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetuneschedule.model import KIND
from finetune_operator.owners import find_controller, find_schedule


def on_event(store: Store, queue: WorkQueue, event_type: str | None, body: Json) -> None:
    """Store a FineTuneSchedule that a watch delivers, and queue a pass unless the operator itself wrote this state."""
    if store.update(KIND, event_type, body):
        queue.add(f"{body['metadata']['namespace']}/{body['metadata']['name']}")


def on_finetunejob(queue: WorkQueue, body: Json) -> None:
    """Queue the FineTuneSchedule that controls a FineTuneJob, if there is one."""
    owner, reference = find_schedule(body), find_controller(body)
    if owner and reference:
        queue.add(f"{owner.namespace}/{reference['name']}")
