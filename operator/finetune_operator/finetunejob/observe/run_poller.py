"""Reads a FineTuneJob's run and version from MLflow in the background.

Both are read once per poll interval, the run together with the runs of other jobs, and neither while the server is unreachable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from finetune_crds.conditions import ConditionType
from finetune_crds.tracking import Register, Tracking
from finetune_operator import names, secrets
from finetune_operator.errors import ExternalError
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow, has_open_run
from finetune_operator.finetunejob.observe.background_reads import Answer, BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.run_batches import RunBatches
from finetune_operator.finetunejob.references import is_unpinned
from finetune_operator.kube import Kube
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.registry.outages import Outages
from finetune_operator.registry.tracked import Tracked, open_tracked
from finetune_operator.settings import DATABRICKS, Settings
from finetune_operator.text import normalize_address


class _Query(NamedTuple):
    """A request of the poller: the run (by its id, if known), and whether to read the version too."""

    run_id: str | None
    includes_version: bool


class Place(NamedTuple):
    """The key of an outage: the address of a server, or the address of a workspace and `reader`, the namespace/name of the Secret.

    NB: a login to Databricks may ask another server, which only the Secret names. So an outage counts only for jobs with that Secret.
    """

    address: str
    reader: str = ""


def find_place(ftj: FineTuneJob, tracked: Tracked, uri: str) -> Place:
    """The place whose outages concern a question of a job.

    Args:
        uri: address of the tracking server or of the registry; not used for a workspace, which is both.
    """
    if tracked.workspace is None:
        return Place(normalize_address(uri))
    reference = ftj.spec.tracking.secret_ref if ftj.spec else None
    reader = f"{ftj.namespace}/{reference.name}" if reference else ""
    return Place(normalize_address(tracked.server.uri), reader)


def find_turn(settings: Settings, ftj: FineTuneJob) -> str:
    """In whose turn a read takes place whose answer jobs may share: the namespace of the job or, on the installation's server, nobody's ("").

    NB: the read would otherwise wait while the first job's namespace waits for other, slow servers, and the jobs of all namespaces with it. A
    server that a job names has no such privilege: otherwise a namespace could occupy this turn with slow servers.
    """
    tracking = ftj.spec.tracking if ftj.spec else Tracking()
    uses_installation = tracking.secret_ref is None and settings.servers(tracking) == settings.servers(
        Tracking()
    )
    return "" if uses_installation else ftj.namespace


@dataclass
class RunPoller:
    """Reads the runs and versions of FineTuneJobs, in threads outside the event loop.

    Attributes:
        pace: pace of the background reads.
        outages: outages of servers, by `Place`, and of logins.
    """

    kube: Kube
    settings: Settings
    pace: ReadPace

    def __post_init__(self) -> None:
        self.outages = Outages(self.pace.clock, self.settings.poll_seconds)
        # NB: a read occupies no thread while it waits for the batch that includes its run. So only its login and
        # its questions take turns.
        self._reads = BackgroundReads[Mlflow | None](
            self.pace, MaxAge.of_polled(self.settings), takes_turns=False, is_complete=_is_complete
        )
        self._batches = RunBatches(self.pace.clock)

    async def poll(self, ftj: FineTuneJob, *, has_pods: bool = True) -> Mlflow | None:
        """The run and version as last read; None if there is nothing to read, no server, or no answer yet.

        Args:
            has_pods: whether the job has pods that have not ended.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        query = _build_query(ftj, has_pods=has_pods)
        if query is None or ftj.spec is None:
            self.forget(ftj)
            return None
        servers = self.settings.servers(ftj.spec.tracking)
        return await self._reads.read(ftj, servers, query, partial(self._read, ftj, query))

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: MLflow was written to, or the job was deleted."""
        self._reads.forget(ftj)

    async def tracked(self, ftj: FineTuneJob) -> Tracked | None:
        """The tracking server and the registry of a job, with its credentials; None if the job has no server.

        Raises:
            ExternalError: the Secret with the credentials is missing, or the workspace does not accept them.
            KubeError: the Secret could not be read.
        """
        tracking = ftj.spec.tracking if ftj.spec else Tracking()
        servers = self.settings.servers(tracking)
        server, _registry = servers
        if not server:
            return None
        secret = await secrets.read(self.kube, ftj.namespace, tracking.secret_ref, secrets.TRACKING)
        if server != DATABRICKS:
            # Only a login to a workspace asks a server.
            return open_tracked(self.settings, tracking, secret)
        login = (servers, secrets.build_key(secret))
        return await self.outages.log_in(login, partial(open_tracked, self.settings, tracking, secret))

    async def ask(
        self, ftj: FineTuneJob, tracked: Tracked, uri: str, question: Callable[[], Answer]
    ) -> Answer:
        """Ask a server a question of a job, and return the answer. During an outage of the server, it is not asked.

        Args:
            uri: address of the server to ask: the tracking server or the registry.
            question: the function that asks; it may block.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        return await self.outages.ask(find_place(ftj, tracked, uri), partial(_ask_server, tracked, question))

    def turn(
        self, ftj: FineTuneJob, tracked: Tracked, turn: str | None = None
    ) -> AbstractAsyncContextManager[None]:
        """A context that occupies one of the threads for requests outside passes, after a wait until one of them is free.

        Args:
            ftj: the job.
            tracked: its servers.
            turn: in whose turn (`find_turn`); None: in that of the job's namespace.
        """
        servers = (tracked.server.uri, tracked.server.registry_uri)
        return self.pace.threads.turn(ftj.namespace if turn is None else turn, servers)

    async def _read(self, ftj: FineTuneJob, query: _Query) -> Mlflow | None:
        """Read the run and, if the query includes it, the version that the run registered."""
        if ftj.spec is None:
            return None
        try:
            # NB: a slow login to a workspace occupies a thread, so the login takes a turn too.
            async with self.pace.threads.turn(ftj.namespace, self.settings.servers(ftj.spec.tracking)):
                tracked = await self.tracked(ftj)
            if tracked is None:
                return None
            server, registration = tracked.server, ftj.spec.register_
            run = await self._find_run(ftj, tracked, query.run_id)
            version = None
            if run and query.includes_version and registration:
                # The recorded run registered the version; if that run was deleted, `run` is another one.
                find_version = partial(_find_version, tracked, registration, query.run_id or run.run_id)
                version = await self._ask_in_turn(ftj, tracked, server.registry_uri, find_version)
        except ExternalError as error:
            return Mlflow(problem=error.problem)
        return Mlflow(run=run, version=version, server=server.uri)

    async def _find_run(self, ftj: FineTuneJob, tracked: Tracked, run_id: str | None) -> Run | None:
        """The run: read by its id together with the runs of other jobs or, if that does not find it, alone."""
        server = tracked.server
        experiment_id = ftj.status.mlflow.experiment_id if ftj.status.mlflow else None
        # NB: workspaces have other limits for searches, so each of their runs is read alone.
        if run_id and experiment_id and tracked.workspace is None:
            search = partial(self._ask_in_turn, ftj, tracked, server.uri, turn=find_turn(self.settings, ftj))
            run = await self._batches.find_run(server, run_id, experiment_id, search)
            if run:
                return run
        # `server.find_run` also finds a run that is not recorded in the status, or was deleted.
        tracking = ftj.spec.tracking if ftj.spec else Tracking()
        experiment = names.experiment(ftj.namespace, tracking, on_databricks=tracked.workspace is not None)
        find_run = partial(server.find_run, ftj.uid, experiment, run_id)
        return await self._ask_in_turn(ftj, tracked, server.uri, find_run)

    async def _ask_in_turn(
        self,
        ftj: FineTuneJob,
        tracked: Tracked,
        uri: str,
        question: Callable[[], Answer],
        *,
        turn: str | None = None,
    ) -> Answer:
        """`ask`, in the turn of the job's namespace or in another one, see `find_turn`."""
        async with self.turn(ftj, tracked, turn):
            return await self.ask(ftj, tracked, uri, question)


def _build_query(ftj: FineTuneJob, *, has_pods: bool) -> _Query | None:
    """Return the request for MLflow.

    It is None if the spec cannot be read, if a finished job has no open run, if the run of the job was not requested yet, or if no pod of a
    suspended job logs to its run.
    """
    run_id = ftj.status.run_id
    if ftj.spec is None or (ftj.is_finished and not has_open_run(ftj.status)):
        return None
    if not ftj.has_requested_run or (run_id is None and is_unpinned(ftj)):
        return None
    if run_id is not None and ftj.spec.suspend and not has_pods:
        return None
    is_unregistered = ftj.holds(ConditionType.TRAINED) and not ftj.holds(ConditionType.REGISTERED)
    return _Query(run_id, includes_version=is_unregistered and ftj.spec.register_ is not None)


def _is_complete(query: Hashable, mlflow: Mlflow | None) -> bool:
    """Whether MLflow has the run, and nothing else was requested."""
    asks_for_run_alone = isinstance(query, _Query) and not query.includes_version
    return asks_for_run_alone and mlflow is not None and mlflow.writable_run is not None


def _ask_server(tracked: Tracked, question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except ExternalError as error:
        # The workspace may no longer accept the token.
        tracked.refused(error)
        raise


def _find_version(tracked: Tracked, registration: Register, run_id: str) -> RegisteredVersion | None:
    return tracked.registry().find_version(registration.model, run_id, registration.aliases)
