"""Asks servers of Git which commit a job is to run; after a problem again, later and later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from finetune_crds.code import Git
from finetune_crds.conditions import ConditionReason
from finetune_operator import secrets
from finetune_operator.bounded import ANONYMOUS, Login
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.decide import checkout
from finetune_operator.finetunejob.model import CodeFound, FineTuneJob
from finetune_operator.git.repository import Repository
from finetune_operator.kube import Kube

# The delay before a server is asked again doubles from the first to the second.
_FIRST_SECONDS = 1.0
_LAST_SECONDS = 30.0
_MOST_JOBS = 4096
# What servers take as the name beside a token.
_ANY_NAME = "git"


@dataclass
class _Problem:
    """What went wrong, and when the server is asked again."""

    found: CodeFound
    delay: float
    due: float


@dataclass
class RevisionReader:
    """Resolves revisions of repositories.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _known: dict[str, _Problem] = field(default_factory=dict)
    """By uid of the FineTuneJob: the last problem."""

    async def read(self, ftj: FineTuneJob) -> CodeFound | None:
        """The commit of a job, or why it is not known; None where there is nothing to ask.

        Raises:
            KubeError: the Secret could not be read.
        """
        git = checkout.to_resolve(ftj)
        if git is None:
            self._known.pop(ftj.uid, None)
            return None
        now, held = self.clock(), self._known.get(ftj.uid)
        if held and now < held.due:
            return replace(held.found, again_seconds=held.due - now)
        try:
            login = await self._login(ftj.namespace, git)
            resolved = await Repository(git.url, login).resolve(git.revision)
        except ExternalError as error:
            return self._note(ftj.uid, error.problem, held.delay * 2 if held else _FIRST_SECONDS)
        return CodeFound(resolved.commit, resolved.branch)

    def _note(self, uid: str, problem: Problem, delay: float) -> CodeFound:
        delay = min(delay, _LAST_SECONDS)
        found = CodeFound(problem=problem, again_seconds=delay)
        if len(self._known) >= _MOST_JOBS:
            self._known.clear()
        self._known[uid] = _Problem(found, delay, self.clock() + delay)
        return found

    async def _login(self, namespace: str, git: Git) -> Login:
        held = await secrets.read(self.kube, namespace, git.secret_ref, secrets.GIT, secrets.GIT_KEYS)
        if held is None:
            return ANONYMOUS
        if not held.get("password"):
            name = git.secret_ref.name if git.secret_ref else ""
            message = f"Secret {name} of {secrets.GIT} has no key password: add it, and username"
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_MISSING, message))
        username = held.get("username") or _ANY_NAME
        if ":" in username:
            name = git.secret_ref.name if git.secret_ref else ""
            message = f"the username in Secret {name} of {secrets.GIT} has a colon, which no login by password can have: correct it"
            raise ExternalError(Problem(ConditionReason.CREDENTIALS_UNREADABLE, message))
        return Login(username, held["password"])
