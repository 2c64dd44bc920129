"""Reads a FineTuneJob's run and version from MLflow: once in a poll interval, and not while its server is unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import Tracking
from finetune_operator import names, secrets
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.decide.pin import is_unpinned
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow
from finetune_operator.finetunejob.recent import Results, recent
from finetune_operator.kube import Kube
from finetune_operator.registry.outages import Outages
from finetune_operator.registry.tracked import Tracked, open_tracked
from finetune_operator.settings import Settings
from finetune_operator.text import canonical


class _Query(NamedTuple):
    """What to read: the run, by its id when that is known, and whether to read the version too."""

    run_id: str | None
    want_version: bool


class Asked(NamedTuple):
    """Whom a job's questions go to: the servers, and the Secret as namespace/name, empty for the installation's login.

    NB: an outage is known of all three together. A registry that only one job names says nothing of the server of the others.
    """

    server: str
    registry: str
    reader: str


def asked(ftj: FineTuneJob, tracked: Tracked) -> Asked:
    """Whom the questions of a job go to."""
    server = tracked.server
    reference = ftj.spec.tracking.secret_ref if ftj.spec else None
    reader = f"{ftj.namespace}/{reference.name}" if reference else ""
    return Asked(canonical(server.uri), canonical(server.registry_uri), reader)


@dataclass
class RunPoller:
    """Reads the runs and versions of FineTuneJobs, in threads beside the event loop.

    Attributes:
        clock: monotonic seconds.
        outages: by `Asked`. NB: not for threads; the event loop alone looks at them.
    """

    kube: Kube
    settings: Settings
    clock: Callable[[], float]
    _results: Results[Mlflow | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outages = Outages(self.clock, self.settings.poll_seconds)

    async def poll(self, ftj: FineTuneJob) -> Mlflow | None:
        """The run and version, at most a poll interval old; None when there is nothing to read, or no server.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        query = _query(ftj)
        if query is None:
            self.forget(ftj)
            return None
        ask = partial(self._read, ftj, query)
        return await recent(self._results, ftj.uid, query, ask, clock=self.clock, settings=self.settings)

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last result: MLflow was written to, or the job was deleted."""
        self._results.pop(ftj.uid, None)

    async def tracked(self, ftj: FineTuneJob) -> Tracked | None:
        """The server and the registry of a job, with its credentials; None when it has none.

        Raises:
            ExternalError: the Secret with the credentials is missing, or the workspace does not accept them.
            KubeError: the Secret could not be read.
        """
        tracking = ftj.spec.tracking if ftj.spec else Tracking()
        if not self.settings.servers(tracking)[0]:
            return None
        secret = await secrets.read(self.kube, ftj.namespace, tracking.secret_ref, secrets.TRACKING)
        return await asyncio.to_thread(open_tracked, self.settings, tracking, secret)

    async def _read(self, ftj: FineTuneJob, query: _Query) -> Mlflow | None:
        try:
            tracked = await self.tracked(ftj)
        except ExternalError as error:
            return Mlflow(problem=error.problem)
        if tracked is None:
            return None
        place = asked(ftj, tracked)
        away = self.outages.of(place)
        if away:
            return Mlflow(problem=away)
        answer = await asyncio.to_thread(_read, tracked, ftj, query.want_version)
        if answer.problem:
            self.outages.note(place, answer.problem)
        return answer


def _query(ftj: FineTuneJob) -> _Query | None:
    """What to read from MLflow; None when the status has all of it, or the job has no run before its models are known."""
    closed = any(
        item.type == ConditionType.TRACKED and item.reason == ConditionReason.RUN_FINISHED
        for item in ftj.status.conditions
    )
    run_id = ftj.status.run_id
    if ftj.spec is None or (ftj.is_finished and (run_id is None or closed)):
        return None
    if run_id is None and is_unpinned(ftj):
        return None
    unregistered = ftj.holds(ConditionType.TRAINED) and not ftj.holds(ConditionType.REGISTERED)
    return _Query(run_id, unregistered and ftj.spec.register_ is not None)


def _read(tracked: Tracked, ftj: FineTuneJob, want_version: bool) -> Mlflow:
    known = ftj.status.run_id
    if ftj.spec is None:
        return Mlflow()
    on_databricks = tracked.workspace is not None
    experiment = names.experiment(ftj.namespace, ftj.spec.tracking, on_databricks=on_databricks)
    try:
        run = tracked.server.find_run(ftj.uid, experiment, known)
        version = None
        if run and want_version and ftj.spec.register_:
            wanted = ftj.spec.register_
            version = tracked.registry().find_version(wanted.model, run.run_id, wanted.aliases)
        return Mlflow(run=run, version=version, server=tracked.server.uri)
    except ExternalError as error:
        tracked.refused(error)
        return Mlflow(problem=error.problem)
