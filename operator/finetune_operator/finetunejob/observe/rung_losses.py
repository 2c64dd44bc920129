"""Reads the evaluation losses of trials at the rungs of a sweep with ASHA, in the background."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.sweep.rungs import DueRung, list_due_rungs
from finetune_operator.mlflow.runs import Server
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

RungLosses = Mapping[int, Mapping[int, float]]
"""Losses by step, by the number of the trial."""


@dataclass
class RungLossReader:
    """Reads the history of the evaluation loss of each trial that has reached a rung.

    NB: the run of a trial has the last loss alone, which may be that of a later step already.

    Attributes:
        pace: pace of the background reads.
    """

    poller: RunPoller
    settings: Settings
    pace: ReadPace

    def __post_init__(self) -> None:
        self._reads = BackgroundReads[RungLosses](self.pace, MaxAge.of_polled(self.settings))

    async def read(self, ftj: FineTuneJob, children: Mapping[str, Json]) -> RungLosses:
        """The losses as last read; empty if no rung is due, there is no answer yet, or MLflow is away.

        Args:
            children: the FineTuneJobs of the sweep, by name.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        sweep = ftj.spec.sweep if ftj.spec else None
        if ftj.spec is None or sweep is None or not sweep.rungs:
            return {}
        due_rungs = list_due_rungs(sweep, ftj.status.sweep, children, ftj.name)
        if not due_rungs:
            self.forget(ftj)
            return {}
        servers = ("rungs", self.settings.servers(ftj.spec.tracking))
        read = partial(self._read, ftj, due_rungs)
        try:
            return await self._reads.read(ftj, servers, tuple(due_rungs), read) or {}
        except ExternalError as error:
            log.info("%s: cannot read losses at rungs: %s; retrying", ftj.key, error.problem.message)
            return {}

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: no rung is due, or the job was deleted."""
        self._reads.forget(ftj)

    async def _read(self, ftj: FineTuneJob, due_rungs: list[DueRung]) -> RungLosses:
        tracked = await self.poller.tracked(ftj)
        if tracked is None:
            return {}
        read = partial(_read_losses, tracked.server, due_rungs)
        return await self.poller.ask(ftj, tracked, tracked.server.uri, read)


def _read_losses(server: Server, due_rungs: list[DueRung]) -> RungLosses:
    """Read the losses of some trials. The call blocks."""
    return {due.number: server.read_metric(due.run_id, contract.METRIC_EVAL_LOSS) for due in due_rungs}
