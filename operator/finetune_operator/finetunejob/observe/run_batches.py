"""Reads the runs of many jobs from a server together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server

# Jobs that log to a server with the same login cause at most five searches a second.
_SEARCH_INTERVAL_SECONDS = 0.2
_MAX_RUNS = 100

Search = Callable[[Callable[[], Mapping[str, Run]]], Coroutine[object, object, Mapping[str, Run]]]
"""Calls a function that blocks, in a thread, and returns its result, for example `asyncio.to_thread`."""


@dataclass
class _Batch:
    """Runs that one search reads.

    Attributes:
        experiments: the experiment of each run, by the run's id.
    """

    experiments: dict[str, str] = field(default_factory=dict)
    search: asyncio.Task[Mapping[str, Run]] | None = None


@dataclass
class RunBatches:
    """Collects the runs to read while a search of their server is under way, and reads them together with the next search.

    If no search is under way, and the last search began long enough ago, the read begins at once.

    Attributes:
        clock: monotonic seconds.
    """

    clock: Callable[[], float]
    _collecting: dict[Server, _Batch] = field(default_factory=dict)
    """By server and login: the batch that has not begun."""
    _last: dict[Server, _Batch] = field(default_factory=dict)
    """By server and login: the newest batch, whether it has begun or not."""
    _next_search_at: dict[Server, float] = field(default_factory=dict)

    async def find_run(self, server: Server, run_id: str, experiment_id: str, search: Search) -> Run | None:
        """A run by its id; None if the search does not find it.

        Args:
            search: calls the search function of the server, for example within the limits of threads.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        batch = self._collecting.get(server)
        if batch is None or len(batch.experiments) >= _MAX_RUNS:
            batch = self._collecting[server] = _Batch()
            batch.search = asyncio.create_task(self._search(server, batch, self._last.get(server), search))
            self._last[server] = batch
        batch.experiments[run_id] = experiment_id
        if batch.search is None:
            raise RuntimeError("a batch without a search")
        # NB: a read that is cancelled must not end the search, which other reads wait for.
        return (await asyncio.shield(batch.search)).get(run_id)

    async def _search(
        self, server: Server, batch: _Batch, before: _Batch | None, search: Search
    ) -> Mapping[str, Run]:
        """Wait for the previous search and the interval, then search for the runs that the batch has collected meanwhile."""
        if before and before.search:
            await asyncio.wait({before.search})
        await asyncio.sleep(max(self._next_search_at.get(server, 0.0) - self.clock(), 0.0))
        # From now on, runs to read go to the next batch.
        if self._collecting.get(server) is batch:
            del self._collecting[server]
        self._next_search_at[server] = self.clock() + _SEARCH_INTERVAL_SECONDS
        try:
            return await search(lambda: server.find_runs(batch.experiments))
        finally:
            if self._last.get(server) is batch:
                # NB: credentials change, and a server with other credentials is another key: old keys must not pile up.
                del self._last[server]
                self._next_search_at = {
                    key: at for key, at in self._next_search_at.items() if at > self.clock()
                }
