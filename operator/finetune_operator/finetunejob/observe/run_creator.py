"""Creates the MLflow runs of FineTuneJobs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.decision import ActionResult, EnsureRun
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.tracked import Tracked

log = logging.getLogger(__name__)

# How long the id of an experiment is used for other jobs. Meanwhile, somebody may give the name of the experiment to another one.
_EXPERIMENT_SECONDS = 60.0


class _Experiment(NamedTuple):
    """The id of an experiment, and when it was read, in monotonic seconds."""

    experiment_id: str
    read_at: float


@dataclass
class RunCreator:
    """Creates runs in threads outside the event loop.

    NB: a created run that no pass has received, for example because the operator was stopped, is found by the next creation.

    Attributes:
        store: has the jobs that exist.
        clock: monotonic seconds.
    """

    poller: RunPoller
    store: Store
    clock: Callable[[], float]
    _experiments: dict[tuple[Server, str], _Experiment] = field(default_factory=dict)
    _requests: set[str] = field(default_factory=set)
    """The uids of the existing jobs whose runs were requested."""

    async def create(self, ftj: FineTuneJob, action: EnsureRun) -> ActionResult:
        """Create the run of a job, or find it.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
            KubeError: the Secret with the credentials could not be read.
        """
        if self._exists(ftj):
            self._requests.add(ftj.uid)
        tracked = await self.poller.tracked(ftj)
        # Without a server, there is nothing to create.
        if tracked is None:
            return ActionResult(action)
        server = tracked.server
        place = server, action.experiment
        experiment_id = self._find_experiment_id(place)
        ensure_run = partial(_ensure_run, server, ftj, action, experiment_id)
        run = await self.poller.ask(ftj, tracked, server.uri, ensure_run)
        if run.experiment_id != experiment_id:
            self._experiments[place] = _Experiment(run.experiment_id, self.clock())
        if not self._exists(ftj):
            # The handler of the deletion came too early to find the run, and no pass will request it.
            await self._close(ftj, tracked, run)
        return ActionResult(action, run=run, server=server.uri)

    def forget(self, ftj: FineTuneJob) -> bool:
        """Forget a job that was deleted, and return whether a run of it was requested, which its status may not name."""
        was_requested = ftj.uid in self._requests
        self._requests.discard(ftj.uid)
        return was_requested

    async def _close(self, ftj: FineTuneJob, tracked: Tracked, run: Run) -> None:
        """Close the run of a job that was deleted while the run was being created."""
        server = tracked.server
        try:
            await self.poller.ask(ftj, tracked, server.uri, partial(server.finish_run, run.run_id, "KILLED"))
        except ExternalError as error:
            log.warning(
                "%s was deleted; its MLflow run %s stays open until the operator starts again: %s",
                ftj.key,
                run.run_id,
                error,
            )
        else:
            log.info("%s was deleted meanwhile: closed its MLflow run %s", ftj.key, run.run_id)

    def _exists(self, ftj: FineTuneJob) -> bool:
        stored = self.store.finetunejobs.get((ftj.namespace, ftj.name))
        return stored is not None and stored["metadata"]["uid"] == ftj.uid

    def _find_experiment_id(self, place: tuple[Server, str]) -> str | None:
        """The id of an experiment, by its server and name, if a run was created there a short while ago."""
        oldest = self.clock() - _EXPERIMENT_SECONDS
        # NB: credentials change, and a server with other credentials is another key: old keys must not pile up.
        self._experiments = {key: item for key, item in self._experiments.items() if item.read_at > oldest}
        experiment = self._experiments.get(place)
        return experiment.experiment_id if experiment else None


def _ensure_run(server: Server, ftj: FineTuneJob, action: EnsureRun, experiment_id: str | None) -> Run:
    run = server.ensure_run(ftj.uid, action.experiment, action.run_name, action.tags, experiment_id)
    log.info("%s is tracked in MLflow run %s", ftj.key, run.run_id)
    return run
