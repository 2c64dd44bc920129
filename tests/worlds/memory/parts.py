"""The operator's parts for FineTuneJobs, connected in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.apply import FineTuneJobApplier
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.finetunejob.reconcile import FineTuneJobReconciler
from finetune_operator.kube import Kube
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings
from worlds.memory.decisions import later


class Parts(NamedTuple):
    """An operator that knows nothing yet."""

    store: Store
    queue: WorkQueue
    reconciler: FineTuneJobReconciler


def parts(kube: Kube, settings: Settings, clock: Callable[[], float], identity: str = "operator-1") -> Parts:
    """Make and connect the parts; `clock` counts seconds from the start of the test."""
    store, queue = Store(children.find_owner, children.recorded_jobs), WorkQueue(clock=clock)
    observer = FineTuneJobObserver(kube, store, settings, clock=clock, wake=queue.add)
    applier = FineTuneJobApplier(kube, store, observer, AliasWriter(kube, settings, identity))
    reconciler = FineTuneJobReconciler(store, queue, observer, applier, settings, now=lambda: later(clock()))
    return Parts(store, queue, reconciler)
