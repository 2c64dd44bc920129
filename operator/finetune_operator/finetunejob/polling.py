"""What MLflow says of a FineTuneJob: asked once in a poll interval, and not at all while its server is away."""

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


class _Question(NamedTuple):
    """What MLflow is asked: the run of the job, by its id where that is known, and whether for the version too."""

    run_id: str | None
    want_version: bool


class _Answer(NamedTuple):
    """What MLflow said to a question, and when."""

    at: float
    question: _Question
    mlflow: Mlflow | None


@dataclass
class RunPoller:
    """Asks MLflow for the runs and versions of FineTuneJobs, off the event loop.

    Attributes:
        clock: seconds that only grow.
    """

    kube: Kube
    settings: Settings
    clock: Callable[[], float]
    _answers: dict[str, _Answer] = field(default_factory=dict)
    """By the FineTuneJob's uid."""

    def __post_init__(self) -> None:
        self._outages = Outages(self.clock, self.settings.poll_seconds)

    async def poll(self, ftj: FineTuneJob) -> Mlflow | None:
        """MLflow's answer, at most a poll interval old; None when there is nothing to ask, or nobody.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        question = _question(ftj)
        if question is None:
            self.forget(ftj)
            return None
        now = self.clock()
        held = self._answers.get(ftj.uid)
        if held and held.question == question and now - held.at < self.settings.poll_seconds * 0.8:
            return held.mlflow
        mlflow = await self._ask(ftj, question)
        self._answers[ftj.uid] = _Answer(now, question, mlflow)
        return mlflow

    def forget(self, ftj: FineTuneJob) -> None:
        """MLflow was written to, or the job is gone: the last answer no longer counts."""
        self._answers.pop(ftj.uid, None)

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

    async def _ask(self, ftj: FineTuneJob, question: _Question) -> Mlflow | None:
        try:
            server = await self.server(ftj)
        except ExternalError as error:
            return Mlflow(problem=error.problem)
        if server is None:
            return None
        away = self._outages.of(server.uri)
        if away:
            return Mlflow(problem=away)
        answer = await asyncio.to_thread(_ask, server, ftj, question.want_version)
        if answer.problem:
            self._outages.note(server.uri, answer.problem)
        return answer


def _question(ftj: FineTuneJob) -> _Question | None:
    """What to ask MLflow; None when the status has all of it."""
    closed = any(
        item.type == ConditionType.TRACKED and item.reason == ConditionReason.RUN_FINISHED
        for item in ftj.status.conditions
    )
    run_id = ftj.status.mlflow.run_id if ftj.status.mlflow else None
    if ftj.spec is None or (ftj.is_finished and (run_id is None or closed)):
        return None
    unregistered = ftj.holds(ConditionType.TRAINED) and not ftj.holds(ConditionType.REGISTERED)
    return _Question(run_id, unregistered and ftj.spec.register_ is not None)


def _ask(server: Server, ftj: FineTuneJob, want_version: bool) -> Mlflow:
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
