"""The operator's parts for FineTuneJobs, connected in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from finetune_operator.controller.store import Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.apply import FineTuneJobApplier
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver
from finetune_operator.finetunejob.reconcile import FineTuneJobReconciler
from finetune_operator.kube import Kube
from finetune_operator.registry.writer import AliasWriter
from finetune_operator.settings import Settings
from worlds.memory.decisions import later
from worlds.memory.reads import wait_for_answers


class Parts(NamedTuple):
    """An operator that knows nothing yet."""

    store: Store
    queue: WorkQueue
    reconciler: FineTuneJobReconciler


def parts(
    kube: Kube,
    settings: Settings,
    clock: Callable[[], float],
    identity: str = "operator-1",
    *,
    make_pace: Callable[[Callable[[], float], Callable[[str], None]], ReadPace] = wait_for_answers,
) -> Parts:
    """Make and connect the parts; `clock` counts seconds from the start of the test."""
    store, queue = Store(children.find_owner, children.recorded_jobs), WorkQueue(clock=clock)
    observer = FineTuneJobObserver(kube, store, settings, make_pace(clock, queue.add))
    writer = AliasWriter(kube, settings, identity)
    applier = FineTuneJobApplier(kube, store, observer.poller, observer.preparations, observer.leases, writer)
    reconciler = FineTuneJobReconciler(store, queue, observer, applier, settings, now=lambda: later(clock()))
    return Parts(store, queue, reconciler)
