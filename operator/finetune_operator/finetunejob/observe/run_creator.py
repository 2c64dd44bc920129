"""Creates the MLflow runs of FineTuneJobs. A pass does not wait long for a slow server: a later pass gets the run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from finetune_operator.finetunejob.model import ActionResult, EnsureRun, FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server

log = logging.getLogger(__name__)

# A later pass that requests the run again must ask MLflow again, for example because the run was deleted.
_NEVER_AGAIN = MaxAge(fresh=0.0, usable=0.0)
# How long the id of an experiment is used for other jobs. Meanwhile, somebody may give the name of the experiment to another one.
_EXPERIMENT_SECONDS = 60.0


class _Experiment(NamedTuple):
    """The id of an experiment, and when it was read, in monotonic seconds."""

    experiment_id: str
    read_at: float


@dataclass
class RunCreator:
    """Creates runs in threads outside the event loop, each once at a time.

    NB: a created run that no pass has received, for example because the operator was stopped, is found by the next creation.
    """

    poller: RunPoller
    pace: ReadPace
    _began_at: dict[str, float] = field(default_factory=dict)
    """By uid of the job: when a creation that is not over began."""
    _experiments: dict[tuple[Server, str], _Experiment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._creations = BackgroundReads[ActionResult](self.pace, _NEVER_AGAIN)

    async def create(self, ftj: FineTuneJob, action: EnsureRun) -> ActionResult:
        """Create the run of a job, or find it; the result is pending while the server takes long, and then queues a pass.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
            KubeError: the Secret with the credentials could not be read.
        """
        tracking = ftj.spec.tracking if ftj.spec else None
        servers = self.poller.settings.servers(tracking) if tracking else ()
        # NB: without the tags, which may differ in the next pass: a creation with other tags would begin beside this one.
        question = (action.experiment, action.run_name)
        began_at = self._began_at.setdefault(ftj.uid, self.pace.clock())
        create = partial(self._create, ftj, action)
        try:
            result = await self._creations.read(ftj, servers, question, create)
        except Exception:
            self._began_at.pop(ftj.uid, None)
            raise
        if result is None:
            return ActionResult(action, pending_seconds=self.pace.clock() - began_at)
        self._began_at.pop(ftj.uid, None)
        return result

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the result for a job that was deleted."""
        self._creations.forget(ftj)
        self._began_at.pop(ftj.uid, None)

    async def _create(self, ftj: FineTuneJob, action: EnsureRun) -> ActionResult:
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
            self._experiments[place] = _Experiment(run.experiment_id, self.pace.clock())
        return ActionResult(action, run=run, server=server.uri)

    def _find_experiment_id(self, place: tuple[Server, str]) -> str | None:
        """The id of an experiment, by its server and name, if a run was created there a short while ago."""
        oldest = self.pace.clock() - _EXPERIMENT_SECONDS
        # NB: credentials change, and a server with other credentials is another key: old keys must not pile up.
        self._experiments = {key: item for key, item in self._experiments.items() if item.read_at > oldest}
        experiment = self._experiments.get(place)
        return experiment.experiment_id if experiment else None


def _ensure_run(server: Server, ftj: FineTuneJob, action: EnsureRun, experiment_id: str | None) -> Run:
    run = server.ensure_run(ftj.uid, action.experiment, action.run_name, action.tags, experiment_id)
    log.info("%s is tracked in MLflow run %s", ftj.key, run.run_id)
    return run
