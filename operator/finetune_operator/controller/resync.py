"""The periodic list: it finds what a watch missed, and queues every resource."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from finetune_operator import names
from finetune_operator.controller.health import Health
from finetune_operator.controller.projection import COMPANIONS
from finetune_operator.controller.store import CHILDREN, KINDS, RESOURCES, Store
from finetune_operator.controller.workqueue import Queues
from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

# A new leader works with a list of up to this age, in resync intervals, and with what its watches have delivered since.
_MAX_AGE_INTERVALS = 2


@dataclass
class Resync:
    """Lists all objects: once before the workers start, then periodically."""

    kube: Kube
    store: Store
    queues: Queues
    settings: Settings
    health: Health
    _listed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """List periodically; retry while the API server is unavailable."""
        while True:
            try:
                await self.run_once()
            except KubeError as error:
                log.warning("failed to list objects: %s; retrying", error)
                self.health.last_attempt = self.health.clock()
                await asyncio.sleep(max(min(5.0, self.settings.resync_seconds), error.retry_after_seconds))
                continue
            await asyncio.sleep(self.settings.resync_seconds)

    async def wait_until_fresh(self) -> None:
        """Wait for the first list, and for another list if this process was paused since the last one."""
        while self.health.list_age_seconds() > _MAX_AGE_INTERVALS * self.settings.resync_seconds:
            self._listed.clear()
            await self._listed.wait()

    async def run_once(self) -> None:
        """Replace the store's content by what exists now, and put every resource on its queue."""
        # NB: children first. For a job without its children in the store, the operator would create them again.
        for kind in KINDS:
            selector = {"labelSelector": names.LABEL_UID} if kind in CHILDREN else {}
            lists = [
                await self.kube.list(kind, namespace, metadata_only=kind in COMPANIONS, **selector)
                # None: one list of all namespaces.
                for namespace in self.settings.namespaces or (None,)
            ]
            bodies = [body for listing in lists for body in listing.objects]
            # NB: the namespaces are listed one after the other, so the version of the oldest list counts: with a newer version, the
            # store would drop an object that was created after its namespace was listed.
            self.store.replace(kind, bodies, min(listing.version for listing in lists))
        self.health.last_list = self.health.last_attempt = self.health.clock()
        self._listed.set()
        if self.queues.is_open:
            self.queue_all()

    def queue_all(self) -> None:
        """Put every resource on its queue, and count the resources for the metrics."""
        for kind in RESOURCES:
            for namespace, name in self.store.of(kind):
                self.queues.of(kind).add(f"{namespace}/{name}")
