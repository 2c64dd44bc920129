"""Reads the evaluations of a sweep's trials in the background: at the rungs of ASHA, and at the end if the metric is not the loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from finetune_crds.base import Json
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.sweep.rungs import DueRead, list_due_reads
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.outages import is_unreachable
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

Evaluations = Mapping[int, Mapping[int, float]]
"""Values of the metric by step, by the number of the trial."""


@dataclass
class TrialEvaluationReader:
    """Reads the history of the sweep's metric of each trial that has reached a rung, or has ended.

    NB: the run itself has the last value alone, which may be that of a later step already.

    Attributes:
        pace: pace of the background reads.
    """

    poller: RunPoller
    settings: Settings
    pace: ReadPace

    def __post_init__(self) -> None:
        self._reads = BackgroundReads[Evaluations](self.pace, MaxAge.of_polled(self.settings))

    async def read(self, ftj: FineTuneJob, children: Mapping[str, Json]) -> Evaluations:
        """The values as last read; empty if none is due, there is no answer yet, or MLflow is away.

        Args:
            children: the FineTuneJobs of the sweep, by name.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        sweep = ftj.spec.sweep if ftj.spec else None
        if ftj.spec is None or sweep is None or ftj.is_finished:
            return {}
        due_reads = list_due_reads(sweep, ftj.status.sweep, children, ftj.name)
        if not due_reads:
            self.forget(ftj)
            return {}
        servers = ("evaluations", self.settings.servers(ftj.spec.tracking))
        read = partial(self._read, ftj, sweep.metric, due_reads)
        try:
            return await self._reads.read(ftj, servers, tuple(due_reads), read) or {}
        except ExternalError as error:
            log.info(
                "%s: cannot read the evaluations of trials: %s; retrying", ftj.key, error.problem.message
            )
            return {}

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: none is due, or the job was deleted."""
        self._reads.forget(ftj)

    async def _read(self, ftj: FineTuneJob, metric: str, due_reads: list[DueRead]) -> Evaluations:
        tracked = await self.poller.tracked(ftj)
        if tracked is None:
            return {}
        read = partial(_read_values, tracked.server, metric, due_reads)
        return await self.poller.ask(ftj, tracked, tracked.server.uri, read)


def _read_values(server: Server, metric: str, due_reads: list[DueRead]) -> Evaluations:
    """Read the values of a metric of some trials, without those whose run the server refuses. The call blocks.

    Raises:
        ExternalError: the server cannot be reached.
    """
    values: dict[int, Mapping[int, float]] = {}
    for due in due_reads:
        try:
            values[due.number] = server.read_metric(due.run_id, metric)
        except ExternalError as error:
            if is_unreachable(error.problem):
                raise
            log.warning("cannot read %s of MLflow run %s: %s", metric, due.run_id, error.problem.message)
    return values
