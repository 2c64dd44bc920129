"""The periodic list: whatever a watch lost is found here, and every job is looked at again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from finetune_operator import metrics, names
from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings
from finetune_operator.store import Store
from finetune_operator.watches import Health
from finetune_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)


@dataclass
class Resync:
    """Lists everything, first once before the workers start, then for ever."""

    kube: Kube
    store: Store
    queue: WorkQueue
    settings: Settings
    health: Health
    first: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """List, and list again; an API server that is away is waited for."""
        while True:
            try:
                await self.once()
            except KubeError as error:
                log.warning("cannot list: %s; trying again", error)
                await asyncio.sleep(min(5.0, self.settings.resync_seconds))
                continue
            self.first.set()
            await asyncio.sleep(self.settings.resync_seconds)

    async def once(self) -> None:
        """Replace the store's content by what exists now, and put every job on the queue."""
        # NB: children first. A job listed without its children would have them made again.
        for kind in ("Job", "Pod", "FineTuneJob"):
            selector = {} if kind == "FineTuneJob" else {"labelSelector": names.LABEL_UID}
            lists = [
                await self.kube.list(kind, namespace, **selector)
                for namespace in self.settings.namespaces or (None,)
            ]
            found = [body for listing in lists for body in listing.objects]
            self.store.replace(kind, found, min(listing.version for listing in lists))
        for namespace, name in self.store.jobs:
            self.queue.add(f"{namespace}/{name}")
        self.health.last_resync = time.monotonic()
        self._count()

    def _count(self) -> None:
        phases = Counter(
            (body.get("status") or {}).get("phase", "Pending") for body in self.store.jobs.values()
        )
        metrics.jobs.clear()
        for phase, count in phases.items():
            metrics.jobs.labels(phase).set(count)
