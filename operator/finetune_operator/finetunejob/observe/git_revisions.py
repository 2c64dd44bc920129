"""Resolves the commits of jobs on Git servers, in the background; retries with backoff after a problem."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from finetune_crds.code import Git
from finetune_crds.conditions import ConditionReason
from finetune_operator import secrets
from finetune_operator.bounded import ANONYMOUS, Login
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import FineTuneJob, ResolvedRevision
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.negative_cache import NegativeCache
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from finetune_operator.finetunejob.references import repository_to_resolve
from finetune_operator.git.repository import Repository
from finetune_operator.kube import Kube, KubeError
from finetune_operator.registry.outages import Outages

_MAX_DELAY_SECONDS = 30.0
# NB: a commit is used at any age, until it is in the status. `read` moves a problem to `_problems`, which delay the next request.
_MAX_AGE = MaxAge(fresh=math.inf, usable=math.inf)
# Limits of concurrent requests, which are connections of the event loop and use no threads.
_MAX_REQUESTS_PER_SERVER = 4
_MAX_REQUESTS_PER_NAMESPACE = 8
_MAX_REQUESTS = 32
# How long the jobs of a namespace do not contact a server that did not respond to one of these jobs.
_OUTAGE_SECONDS = 5.0
# The username that servers accept with a token.
_DEFAULT_USERNAME = "git"

log = logging.getLogger(__name__)


class _Server(NamedTuple):
    """A Git server, as the jobs of one namespace see it: they share its outages and its limit of requests."""

    namespace: str
    host: str


@dataclass
class RevisionReader:
    """Resolves revisions of repositories.

    Attributes:
        pace: pace of the background reads.
    """

    kube: Kube
    pace: ReadPace

    def __post_init__(self) -> None:
        self._connections = RequestLimits(
            _MAX_REQUESTS, _MAX_REQUESTS_PER_NAMESPACE, _MAX_REQUESTS_PER_SERVER
        )
        self._reads = BackgroundReads[ResolvedRevision](self.pace, _MAX_AGE, takes_turns=False)
        self._problems = NegativeCache[ResolvedRevision](self.pace.clock, _MAX_DELAY_SECONDS)
        self._outages = Outages(self.pace.clock, _OUTAGE_SECONDS)

    async def read(self, ftj: FineTuneJob) -> ResolvedRevision | None:
        """The commit of a job, or why it is not known; None if there is nothing to resolve, or no answer yet.

        Raises:
            KubeError: the Secret could not be read.
        """
        git = repository_to_resolve(ftj)
        if git is None:
            self.forget(ftj)
            return None
        last_failure = self._problems.last_answer(ftj.uid)
        retry_seconds = self._problems.seconds_left(ftj.uid)
        if last_failure and retry_seconds:
            return replace(last_failure, retry_seconds=retry_seconds)
        server = _Server(ftj.namespace, urlsplit(git.url).netloc.lower())
        revision = await self._reads.read(ftj, server, git, partial(self._resolve, ftj, git, server))
        if revision is None:
            # While the request is repeated, the last problem stays.
            return last_failure
        if revision.problem is None:
            return revision
        self._reads.forget(ftj)
        return replace(revision, retry_seconds=self._problems.record(ftj.uid, revision))

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer, and stop asking: the commit is in the status, or the job was deleted."""
        self._reads.forget(ftj, cancel=True)
        self._problems.forget(ftj.uid)

    async def _resolve(self, ftj: FineTuneJob, git: Git, server: _Server) -> ResolvedRevision:
        try:
            repository = Repository(git.url, await self._read_login(ftj.namespace, git))
            async with self._connections.turn(*server):
                return await self._ask(repository, git.revision, server)
        except ExternalError as error:
            return ResolvedRevision(problem=error.problem)
        except KubeError:
            raise
        except Exception:
            log.exception("%s: the commit of %s could not be found", ftj.key, git.url)
            message = f"the operator failed to resolve the commit of {git.url} and retries: see its log"
            return ResolvedRevision(problem=Problem(ConditionReason.INTERNAL_ERROR, message))

    async def _ask(self, repository: Repository, revision: str, server: _Server) -> ResolvedRevision:
        """Ask the server for the commit, unless the server did not respond to another request a moment ago."""
        if self._outages.of(server):
            message = f"the repository {repository.url} cannot be reached: {server.host} did not respond to another request"
            return ResolvedRevision(problem=Problem(ConditionReason.GIT_UNREACHABLE, message))
        try:
            resolved = await repository.resolve(revision)
        except ExternalError as error:
            self._outages.note(server, error.problem)
            raise
        return ResolvedRevision(resolved.commit, resolved.branch)

    async def _read_login(self, namespace: str, git: Git) -> Login:
        """The login in the Secret of the spec; anonymous without a Secret."""
        secret = await secrets.read(self.kube, namespace, git.secret_ref, secrets.GIT, secrets.GIT_KEYS)
        if secret is None:
            return ANONYMOUS
        name = git.secret_ref.name if git.secret_ref else ""
        if not secret.get("password"):
            message = (
                f"Secret {name} of {secrets.GIT} lacks the key password: add the keys username and password"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_MISSING, message))
        username = secret.get("username") or _DEFAULT_USERNAME
        if ":" in username:
            message = (
                f"the username in Secret {name} of {secrets.GIT} contains a colon, which basic authentication does "
                "not allow: correct the username"
            )
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        return Login(username, secret["password"])
