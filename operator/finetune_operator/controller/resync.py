"""The periodic list: it finds what a watch missed, and queues every resource then.

The passes over resources are not periodic lists: each pass plans the next one (`Reconciler.handle`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.controller.health import Health
from finetune_operator.controller.projection import COMPANIONS, list_companion_kinds, project
from finetune_operator.controller.store import CHILDREN, KINDS, RESOURCES, Store
from finetune_operator.controller.workqueue import Queues
from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
# With many objects, lists are less frequent: an object takes about 0.2 ms of CPU time, so at this rate lists take 0.2 s a minute.
_OBJECTS_PER_SECOND = 16.0
_MAX_INTERVALS = 10


@dataclass
class Resync:
    """Lists all objects: at the start, when this replica becomes the leader, soon after a watch began, and periodically."""

    kube: Kube
    store: Store
    queues: Queues
    settings: Settings
    health: Health
    on_vanished: Callable[[Json], None]
    """Called with each FineTuneJob of whose deletion only a list tells, because no watch ran when it was deleted."""
    _begun: int = 0
    """Lists that have begun."""
    _complete: int = 0
    """The number of the last list that is complete."""
    _listed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _is_watch_new: bool = False
    """Whether a watch has begun since the last list began."""
    _has_news: bool = False
    """Whether lists have changed the store since all resources were last queued."""

    async def run(self) -> None:
        """List when a list is due; retry while the API server is unavailable."""
        while True:
            try:
                await self.run_once()
            except KubeError as error:
                log.warning("failed to list objects: %s; retrying", error)
                self.health.last_attempt = self.health.clock()
                delay = min(_RETRY_SECONDS, self.settings.resync_seconds)
                await asyncio.sleep(max(delay, error.retry_after_seconds))
                continue
            await self._wait_until_due()

    async def _wait_until_due(self) -> None:
        """Wait until a list is requested, or the interval has gone by; with a new watch, one resync interval suffices."""
        for _ in range(self._count_intervals()):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.resync_seconds):
                    await self._is_requested.wait()
            self.health.note_lists_in_time()
            if self._is_requested.is_set() or self._is_watch_new:
                return

    def _count_intervals(self) -> int:
        """The number of resync intervals between two lists."""
        objects = sum(len(self.store.of(kind)) for kind in KINDS)
        intervals = objects / (_OBJECTS_PER_SECOND * self.settings.resync_seconds)
        return math.ceil(min(max(intervals, 1), _MAX_INTERVALS))

    def list_soon(self) -> None:
        """List again when the current resync interval has gone by: a watch has begun, and does not report what was deleted before."""
        self._is_watch_new = True

    async def list_anew(self) -> None:
        """Wait for a list that begins after this call.

        NB: the lists and watches of two kinds have no common order. With an older list, a new leader could know the status that the old
        leader wrote, but not the Job that the old leader had created before that write. The new leader would then start the next attempt
        beside that Job.
        """
        number = self._begun + 1
        self._is_requested.set()
        while self._complete < number:
            self._listed.clear()
            await self._listed.wait()

    async def run_once(self) -> None:
        """Replace the store's content by what exists now; if that was news and the queues are open, put every resource on its queue."""
        self._begun += 1
        self._is_requested.clear()
        self._is_watch_new = False
        number = self._begun
        try:
            await self._list()
        finally:
            # Also after a failure: what was listed before the failure is in the store, and a watch event queues nothing if the store already
            # has its object.
            if self.queues.is_open and self._has_news:
                self.queue_all()
        self.health.note_lists_in_time()
        self._complete = number
        self._listed.set()

    async def _list(self) -> None:
        # NB: KINDS begins with the children: the operator would create them again for a job that is in the store without them.
        unused_kinds = {*COMPANIONS} - {*list_companion_kinds(self.settings)}
        for kind in KINDS:
            if kind in unused_kinds:
                continue
            selector = {"labelSelector": names.LABEL_UID} if kind in CHILDREN else {}
            lists = [
                await self.kube.list(
                    kind,
                    namespace,
                    metadata_only=kind in COMPANIONS,
                    project=partial(project, kind),
                    **selector,
                )
                # None: one list of all namespaces.
                for namespace in self.settings.namespaces or (None,)
            ]
            bodies = [body for listing in lists for body in listing.objects]
            # NB: the namespaces are listed one after the other, so the version of the oldest list counts: with a newer version, the
            # store would drop an object that was created after its namespace was listed.
            news = self.store.replace(kind, bodies, min(listing.version for listing in lists))
            self._has_news |= news.has_changed
            if kind == "FineTuneJob":
                for body in news.vanished:
                    self.on_vanished(body)

    def queue_all(self) -> None:
        """Put every resource on its queue, behind those with news: only a few of them may need a pass."""
        self._has_news = False
        for kind in RESOURCES:
            for namespace, name in self.store.of(kind):
                self.queues.of(kind).add(f"{namespace}/{name}", is_routine=True)
