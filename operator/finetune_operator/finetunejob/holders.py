"""Reads which versions the aliases point at that a FineTuneJob starts from: once in a poll interval, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from finetune_crds.aliased import Aliased
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.decide.pin import to_look_up
from finetune_operator.finetunejob.model import FineTuneJob, Holder
from finetune_operator.finetunejob.polling import RunPoller
from finetune_operator.finetunejob.recent import Results, recent
from finetune_operator.registry.tracked import Tracked
from finetune_operator.settings import Settings

Holders = Mapping[str, Holder]


@dataclass
class HolderReader:
    """Looks aliases up in the registries of FineTuneJobs.

    Attributes:
        clock: monotonic seconds.
    """

    poller: RunPoller
    settings: Settings
    clock: Callable[[], float]
    _results: Results[Holders] = field(default_factory=dict)

    async def read(self, ftj: FineTuneJob) -> Holders:
        """The versions, by the field of `status.pinned`; empty where the job waits for none, or has no server.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        wanted = to_look_up(ftj)
        if not wanted:
            self._results.pop(ftj.uid, None)
            return {}
        ask, question = partial(self._read, ftj, wanted), tuple(wanted.items())
        return await recent(self._results, ftj.uid, question, ask, clock=self.clock, settings=self.settings)

    async def _read(self, ftj: FineTuneJob, wanted: Mapping[str, Aliased]) -> Holders:
        try:
            tracked = await self.poller.tracked(ftj)
            if tracked is None:
                return {}
            return await asyncio.to_thread(self._look_up, tracked, wanted)
        except ExternalError as error:
            return dict.fromkeys(wanted, Holder(problem=error.problem))

    def _look_up(self, tracked: Tracked, wanted: Mapping[str, Aliased]) -> Holders:
        away = self.poller.outages.of(tracked.server.uri)
        if away:
            return dict.fromkeys(wanted, Holder(problem=away))
        try:
            registry = tracked.registry()
            models = {field: registry.model(aliased.model) for field, aliased in wanted.items()}
        except ExternalError as error:
            tracked.refused(error)
            self.poller.outages.note(tracked.server.uri, error.problem)
            raise
        return {
            field: Holder(
                exists=model is not None, version=model.holder(wanted[field].alias) if model else None
            )
            for field, model in models.items()
        }
