"""Reads a FineTuneJob's run and version from MLflow: once in a poll interval, and not while its server is unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import Tracking
from finetune_operator import names, secrets
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow
from finetune_operator.kube import Kube
from finetune_operator.mlflow.host import Credentials
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.outages import Outages
from finetune_operator.settings import Settings


class _Query(NamedTuple):
    """What to read: the run, by its id when that is known, and whether to read the version too."""

    run_id: str | None
    want_version: bool


class _Result(NamedTuple):
    """The result of a query, and when it was read."""

    at: float
    query: _Query
    mlflow: Mlflow | None


@dataclass
class RunPoller:
    """Reads the runs and versions of FineTuneJobs, in threads beside the event loop.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    settings: Settings
    clock: Callable[[], float]
    _results: dict[str, _Result] = field(default_factory=dict)
    """By the FineTuneJob's uid."""

    def __post_init__(self) -> None:
        self._outages = Outages(self.clock, self.settings.poll_seconds)

    async def poll(self, ftj: FineTuneJob) -> Mlflow | None:
        """The run and version, at most a poll interval old; None when there is nothing to read, or no server.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        query = _query(ftj)
        if query is None:
            self.forget(ftj)
            return None
        now = self.clock()
        held = self._results.get(ftj.uid)
        if held and held.query == query and now - held.at < self.settings.poll_seconds * 0.8:
            return held.mlflow
        mlflow = await self._read(ftj, query)
        self._results[ftj.uid] = _Result(now, query, mlflow)
        return mlflow

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last result: MLflow was written to, or the job was deleted."""
        self._results.pop(ftj.uid, None)

    async def server(self, ftj: FineTuneJob) -> Server | None:
        """The MLflow server of a job, with its credentials; None when it has none.

        Raises:
            ExternalError: the Secret with the credentials is missing.
            KubeError: it could not be read.
        """
        tracking = ftj.spec.tracking if ftj.spec else None
        uri, registry = self.settings.servers(tracking or Tracking())
        if not uri:
            return None
        reference = tracking.secret_ref if tracking else None
        secret = await secrets.read(self.kube, ftj.namespace, reference, secrets.TRACKING)
        return Server(uri, registry, Credentials.of(secret))

    async def _read(self, ftj: FineTuneJob, query: _Query) -> Mlflow | None:
        try:
            server = await self.server(ftj)
        except ExternalError as error:
            return Mlflow(problem=error.problem)
        if server is None:
            return None
        away = self._outages.of(server.uri)
        if away:
            return Mlflow(problem=away)
        answer = await asyncio.to_thread(_read, server, ftj, query.want_version)
        if answer.problem:
            self._outages.note(server.uri, answer.problem)
        return answer


def _query(ftj: FineTuneJob) -> _Query | None:
    """What to read from MLflow; None when the status has all of it."""
    closed = any(
        item.type == ConditionType.TRACKED and item.reason == ConditionReason.RUN_FINISHED
        for item in ftj.status.conditions
    )
    run_id = ftj.status.mlflow.run_id if ftj.status.mlflow else None
    if ftj.spec is None or (ftj.is_finished and (run_id is None or closed)):
        return None
    unregistered = ftj.holds(ConditionType.TRAINED) and not ftj.holds(ConditionType.REGISTERED)
    return _Query(run_id, unregistered and ftj.spec.register_ is not None)


def _read(server: Server, ftj: FineTuneJob, want_version: bool) -> Mlflow:
    known = ftj.status.mlflow.run_id if ftj.status.mlflow else None
    if ftj.spec is None:
        return Mlflow()
    try:
        run = server.find_run(ftj.uid, names.experiment(ftj.namespace, ftj.spec.tracking), known)
        version = None
        if run and want_version and ftj.spec.register_:
            wanted = ftj.spec.register_
            registry = MlflowRegistry.of(server)
            version = registry.find_version(wanted.model, run.run_id, wanted.aliases)
        return Mlflow(run=run, version=version)
    except ExternalError as error:
        return Mlflow(problem=error.problem)
