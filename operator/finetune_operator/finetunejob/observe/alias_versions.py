"""Resolves the aliases that FineTuneJobs start from, in the background: jobs with one login share a read per model and poll interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from finetune_crds.aliased import Aliased
from finetune_crds.env import LocalReference
from finetune_crds.tracking import Tracking
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import AliasVersion, FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.run_poller import RunPoller, find_turn
from finetune_operator.finetunejob.observe.shared_answers import SharedAnswers
from finetune_operator.finetunejob.references import aliases_to_resolve
from finetune_operator.registry.base import RegisteredModel
from finetune_operator.registry.tracked import Tracked
from finetune_operator.settings import Settings

AliasVersions = Mapping[str, AliasVersion]


class _Question(NamedTuple):
    """A registered model, and what is needed to read it: the tracking server, the registry, and the Secret with the credentials."""

    servers: tuple[str, str]
    namespace: str | None
    secret: LocalReference | None
    model: str


@dataclass
class AliasVersionReader:
    """Looks aliases up in the registries of FineTuneJobs.

    Attributes:
        pace: pace of the background reads.
    """

    poller: RunPoller
    settings: Settings
    pace: ReadPace

    def __post_init__(self) -> None:
        max_age = MaxAge.of_polled(self.settings)
        self._models = SharedAnswers[RegisteredModel | Problem | None](self.pace.clock, max_age.fresh)
        self._reads = BackgroundReads[AliasVersions](
            self.pace, MaxAge.of_shared(self.settings), takes_turns=False
        )

    async def read(self, ftj: FineTuneJob) -> AliasVersions:
        """The versions as last read, by the field of `status.pinned`; empty without an alias to resolve, a server, or an answer.

        Raises:
            KubeError: the Secret with the credentials could not be read.
        """
        tracking = ftj.spec.tracking if ftj.spec else Tracking()
        aliases = aliases_to_resolve(ftj)
        servers = self.settings.servers(tracking)
        tracking_server, _ = servers
        if not tracking_server or not aliases:
            self.forget(ftj)
            return {}
        look_up = partial(self._look_up, ftj, tracking, servers, aliases)
        # NB: while one read is late, passes wait for no other read with the same key. With "aliases" in this key, a late read of an
        # alias does not keep passes from waiting for the reads of runs on the same servers.
        server_key = ("aliases", servers)
        question = tuple(aliases.items())
        return await self._reads.read(ftj, server_key, question, look_up) or {}

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: the versions are known, or the job was deleted."""
        self._reads.forget(ftj)

    async def _look_up(
        self, ftj: FineTuneJob, tracking: Tracking, servers: tuple[str, str], aliases: Mapping[str, Aliased]
    ) -> AliasVersions:
        return {
            field: _find_version(await self._find_model(ftj, tracking, servers, aliased.model), aliased)
            for field, aliased in aliases.items()
        }

    async def _find_model(
        self, ftj: FineTuneJob, tracking: Tracking, servers: tuple[str, str], model: str
    ) -> RegisteredModel | Problem | None:
        """A registered model, from the answer that jobs share; None if it does not exist."""
        secret = tracking.secret_ref
        # Without a Secret, jobs of all namespaces share the answer.
        question = _Question(servers, ftj.namespace if secret else None, secret, model)
        return await self._models.answer(question, partial(self._read, ftj, question))

    async def _read(self, ftj: FineTuneJob, question: _Question) -> RegisteredModel | Problem | None:
        try:
            async with self.pace.threads.turn(find_turn(self.settings, ftj), question.servers):
                tracked = await self.poller.tracked(ftj)
                if tracked is None:  # not reached: `read` requires a server
                    return None
                look_up = partial(_read_model, tracked, question.model)
                return await self.poller.ask(ftj, tracked, tracked.server.registry_uri, look_up)
        except ExternalError as error:
            return error.problem


def _read_model(tracked: Tracked, model: str) -> RegisteredModel | None:
    """Read a registered model. The call blocks."""
    return tracked.registry().model(model)


def _find_version(model: RegisteredModel | Problem | None, aliased: Aliased) -> AliasVersion:
    """The version that an alias points at, from the answer about its model."""
    if isinstance(model, Problem):
        return AliasVersion(problem=model)
    return AliasVersion(exists=model is not None, version=model.holder(aliased.alias) if model else None)
