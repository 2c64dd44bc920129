"""Resolves the commits of jobs on Git servers, outside the passes; retries with backoff after a problem."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from finetune_crds.code import Git
from finetune_crds.conditions import ConditionReason
from finetune_operator import secrets
from finetune_operator.bounded import ANONYMOUS, Login
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import FineTuneJob, ResolvedRevision
from finetune_operator.finetunejob.observe.retry_backoff import RetryBackoff
from finetune_operator.finetunejob.references import repository_to_resolve
from finetune_operator.git.repository import Repository
from finetune_operator.kube import Kube
from finetune_operator.registry.outages import Outages

_MAX_DELAY_SECONDS = 30.0
# Concurrent requests: of a namespace to one server, of a namespace to all servers, and of all jobs.
_MAX_REQUESTS_PER_SERVER = 4
_MAX_REQUESTS_PER_NAMESPACE = 8
_MAX_REQUESTS = 32
# How long the jobs of a namespace do not contact a server that did not respond.
_OUTAGE_SECONDS = 5.0
# The username that servers accept with a token.
_DEFAULT_USERNAME = "git"

log = logging.getLogger(__name__)


class _Server(NamedTuple):
    """A server as the jobs of a namespace ask it.

    NB: not for all namespaces: a slow repository of one would keep the jobs of the others from a server that many share.
    """

    namespace: str
    host: str


@dataclass
class RevisionReader:
    """Resolves revisions of repositories. A pass sees the last answer, and never waits for a server.

    Attributes:
        clock: monotonic seconds.
        wake: queues a pass over the job with this key; called when a server has responded or timed out.
    """

    kube: Kube
    clock: Callable[[], float]
    wake: Callable[[str], None]
    _found: dict[str, ResolvedRevision] = field(default_factory=dict)
    """By uid of the FineTuneJob: the commit, until it is in the status."""
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By uid of the FineTuneJob: the request that is being made."""
    _turns: WeakValueDictionary[_Server | str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    """By server, and by namespace."""

    def __post_init__(self) -> None:
        self._turns_of_all = asyncio.Semaphore(_MAX_REQUESTS)
        self._problems = RetryBackoff[ResolvedRevision](self.clock, _MAX_DELAY_SECONDS)
        self._outages = Outages(self.clock, _OUTAGE_SECONDS)

    async def read(self, ftj: FineTuneJob) -> ResolvedRevision | None:
        """The commit of a job, or why it is not known; None where there is nothing to ask, or no answer yet.

        Raises:
            KubeError: the Secret could not be read.
        """
        git = repository_to_resolve(ftj)
        if git is None:
            self.forget(ftj)
            return None
        if (
            ftj.uid not in self._asking
            and ftj.uid not in self._found
            and not self._problems.seconds_left(ftj.uid)
        ):
            await self._ask(ftj, git)
        revision, problem = self._found.get(ftj.uid), self._problems.last_answer(ftj.uid)
        return revision or (
            problem and replace(problem, retry_seconds=self._problems.seconds_left(ftj.uid) or None)
        )

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard what is known, and stop asking: the commit is in the status, or the job was deleted."""
        self._found.pop(ftj.uid, None)
        self._problems.forget(ftj.uid)
        asking = self._asking.pop(ftj.uid, None)
        if asking:
            asking.cancel()

    async def _ask(self, ftj: FineTuneJob, git: Git) -> None:
        """Begin to ask the server, unless the login is missing."""
        try:
            repository = Repository(git.url, await self._login(ftj.namespace, git))
        except ExternalError as error:
            self._problems.record(ftj.uid, ResolvedRevision(problem=error.problem))
            return
        self._asking[ftj.uid] = asyncio.create_task(self._follow(ftj, repository, git.revision))

    async def _follow(self, ftj: FineTuneJob, repository: Repository, revision: str) -> None:
        """Keep what a server answers, and have the job looked at."""
        try:
            resolved = await self._resolve(ftj.namespace, repository, revision)
        except Exception:
            log.exception("%s: the commit of %s could not be found", ftj.key, repository.url)
            message = (
                f"the operator failed to resolve the commit of {repository.url} and retries: see its log"
            )
            resolved = ResolvedRevision(problem=Problem(ConditionReason.INTERNAL_ERROR, message))
        self._asking.pop(ftj.uid, None)
        if resolved.problem:
            self._problems.record(ftj.uid, resolved)
        else:
            self._found[ftj.uid] = resolved
        self.wake(ftj.key)

    async def _resolve(self, namespace: str, repository: Repository, revision: str) -> ResolvedRevision:
        server = _Server(namespace, urlsplit(repository.url).netloc.lower())
        # NB: who waits for a server holds no turn that the jobs of another server or namespace need.
        async with (
            self._turns.setdefault(server, asyncio.Semaphore(_MAX_REQUESTS_PER_SERVER)),
            self._turns.setdefault(namespace, asyncio.Semaphore(_MAX_REQUESTS_PER_NAMESPACE)),
            self._turns_of_all,
        ):
            if self._outages.of(server):
                message = f"the repository {repository.url} cannot be reached: {server.host} did not respond to another request"
                return ResolvedRevision(problem=Problem(ConditionReason.GIT_UNREACHABLE, message))
            try:
                resolved = await repository.resolve(revision)
            except ExternalError as error:
                self._outages.note(server, error.problem)
                return ResolvedRevision(problem=error.problem)
        return ResolvedRevision(resolved.commit, resolved.branch)

    async def _login(self, namespace: str, git: Git) -> Login:
        secret = await secrets.read(self.kube, namespace, git.secret_ref, secrets.GIT, secrets.GIT_KEYS)
        if secret is None:
            return ANONYMOUS
        if not secret.get("password"):
            name = git.secret_ref.name if git.secret_ref else ""
            message = (
                f"Secret {name} of {secrets.GIT} lacks the key password: add the keys username and password"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_MISSING, message))
        username = secret.get("username") or _DEFAULT_USERNAME
        if ":" in username:
            name = git.secret_ref.name if git.secret_ref else ""
            message = f"the username in Secret {name} of {secrets.GIT} contains a colon, which basic authentication does not allow: correct it"
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        return Login(username, secret["password"])
