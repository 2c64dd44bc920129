"""The only writer of aliases and of the tags that are set with them.

MLflow overwrites an alias without comparing. The writer therefore holds a Lease of the registered model while it reads,
compares, writes and reads again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.leases import Held, Leases
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import Kube, KubeError
from finetune_operator.registry.base import MoveAlias, Registry
from finetune_operator.settings import UNITY_CATALOG, Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

ANYWHERE = "any"
"""What `MoveAlias.expected` is where it does not matter what the alias points at now."""

# NB: MLflow's client gives up 10 s after it connected, and takes at most as long to connect.
_WRITE_SECONDS = 25.0
_LEASE_SECONDS = 60
_UNANSWERED = (ConditionReason.MLFLOW_UNREACHABLE, ConditionReason.DATABRICKS_UNREACHABLE)
# What the API server answers about a Lease, and goes on answering until somebody changes a role or a policy.
_NOT_ALLOWED = (400, 403, 404, 422)


class AliasMoved(ExternalError):  # noqa: N818
    """An alias does not point where it was expected to: somebody else moved it.

    Attributes:
        alias: the alias: the one to be moved, or the one that the version comes from.
        found: the version that it points at; None when there is no such alias.
    """

    def __init__(self, model: str, alias: str, found: str | None, expected: str | None) -> None:
        message = f"alias {alias} of {model} {_points(found)}, and {_pointed(expected)} expected: the next pass reads it again"
        super().__init__(Problem(ConditionReason.ALIAS_MOVED, message))
        self.alias = alias
        self.found = found


class ModelReplaced(ExternalError):  # noqa: N818
    """The registry holds another model of the same name than the one that the move was decided on."""

    def __init__(self, model: str) -> None:
        message = f"registered model {model} was created anew, or the spec leads to another registry"
        super().__init__(Problem(ConditionReason.REGISTRY_CHANGED, message))


class VersionNotReady(ExternalError):  # noqa: N818
    """The version does not exist, or its files are not complete."""

    def __init__(self, model: str, version: str, why: str) -> None:
        message = (
            f"no alias can be pointed at version {version} of {model}, which {why}: name another version"
        )
        super().__init__(Problem(ConditionReason.MOVE_REFUSED, message))


@dataclass
class AliasWriter:
    """Moves aliases, one at a time for each registered model among all replicas of the operator.

    Attributes:
        identity: of this process, and of no other.
        clock: seconds that only grow.
        lease_seconds: how long others wait for a holder that died.
        write_seconds: the longest that one request to the registry takes.
    """

    kube: Kube
    settings: Settings
    identity: str
    clock: Callable[[], float] = time.monotonic
    lease_seconds: int = _LEASE_SECONDS
    write_seconds: float = _WRITE_SECONDS
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        self._leases = Leases(
            self.kube, self.settings.namespace, self.identity, self.lease_seconds, self.clock
        )

    async def move(
        self,
        registry: Registry,
        model: str,
        alias: str,
        move: MoveAlias,
        still: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Point the alias at a version, or remove it, if everything still is as `move` says; tag the version first.

        May be repeated: what is as wanted is not written again. NB: tags go before the alias. A crash between the
        two leaves the alias where it was, and the next pass does it all again.

        `still` is called under the Lease before every write, and raises what it likes where the move is no longer
        wanted; nothing more is written then.

        Raises:
            LeaseBusy: another process writes to the model; come back in about a second.
            AliasMoved: the alias, or the one that the version comes from, points elsewhere.
            ModelReplaced: the model is not the one that the move was decided on.
            VersionNotReady: the version does not exist, or its files are not complete.
            ExternalError: the registry, or the Lease, could not be read or written.
        """
        name = lease_name(registry.uri, model)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            lease = await self._take(name, model)
            turn = _Turn(self._leases, lease, self.clock, self.write_seconds, model, still)
            try:
                await _move(turn, registry, alias, move)
            finally:
                # NB: a write without an answer may still be carried out. Nobody else writes before it is over.
                if not turn.unanswered:
                    await self._leases.give_back(turn.lease)

    async def _take(self, name: str, model: str) -> Held:
        try:
            return await self._leases.take(name, f"aliases of {model}")
        except KubeError as error:
            raise _no_lease(self._leases.namespace, name, model, error) from error


def lease_name(registry_uri: str, model: str) -> str:
    """Name of the Lease of a registered model. People choose names of models, so it is a hash."""
    if registry_uri.startswith(UNITY_CATALOG):
        # NB: to Unity Catalog Main.llm.Support and main.llm.support are the same.
        model = model.casefold()
    digest = hashlib.sha256(f"{registry_uri}\0{model}".encode()).hexdigest()
    return f"finetune-aliases-{digest[:32]}"


@dataclass
class _Turn:
    """Calls to the registry for one model, and the Lease under which they are made.

    Attributes:
        still: raises where the move is no longer wanted.
        unanswered: whether a write was sent and its result is unknown.
    """

    leases: Leases
    lease: Held
    clock: Callable[[], float]
    write_seconds: float
    model: str
    still: Callable[[], Awaitable[None]] | None = None
    unanswered: bool = False

    async def write(self, call: Callable[..., None], *arguments: object) -> None:
        """Write to the registry, with enough time left that the answer comes while the Lease is ours.

        Raises:
            LeaseBusy: the Lease ran out and somebody else took it; nothing was written.
            ExternalError: the Lease could not be renewed, or the registry not written to.
        """
        if self.still:
            await self.still()
        if self.lease.until - self.clock() < self.write_seconds:
            await self._renew()
        self.unanswered = True
        try:
            await asyncio.to_thread(call, *arguments)
        except ExternalError as error:
            self.unanswered = error.problem.reason in _UNANSWERED
            raise
        self.unanswered = False

    async def _renew(self) -> None:
        try:
            self.lease = await self.leases.renew(self.lease)
        except KubeError as error:
            name = self.lease.body["metadata"]["name"]
            raise _no_lease(self.leases.namespace, name, self.model, error) from error


async def _move(turn: _Turn, registry: Registry, alias: str, move: MoveAlias) -> None:
    """Read, compare, write, and read again."""
    model = turn.model
    held = await asyncio.to_thread(registry.model, model)
    if held and move.created and held.created not in (None, move.created):
        raise ModelReplaced(model)
    aliases = dict(held.aliases) if held else {}
    found = aliases.get(alias)
    if found != move.to and move.expected not in (ANYWHERE, found):
        raise AliasMoved(model, alias, found, move.expected)
    if move.to is None:
        if found is None:
            return
        await turn.write(registry.delete_alias, model, alias)
    else:
        if move.source is not None and aliases.get(move.source) != move.to:
            raise AliasMoved(model, move.source, aliases.get(move.source), move.to)
        await _tag(turn, registry, move)
        if found == move.to:
            return
        await turn.write(registry.set_alias, model, alias, move.to)
    written = await asyncio.to_thread(registry.model, model)
    after = written.aliases.get(alias) if written else None
    if after != move.to:
        raise AliasMoved(model, alias, after, move.to)
    log.info("alias %s of %s %s, and %s before", alias, model, _points(after), _pointed(found))


async def _tag(turn: _Turn, registry: Registry, move: MoveAlias) -> None:
    """Check that the version exists and is ready, and set the tags that it lacks."""
    assert move.to is not None  # noqa: S101 - an alias that is removed has no version
    model = turn.model
    version = await asyncio.to_thread(registry.version, model, move.to)
    if version is None:
        raise VersionNotReady(model, move.to, "does not exist")
    if not version.ready:
        raise VersionNotReady(model, move.to, "is not READY")
    for key, value in move.tags.items():
        if version.tags.get(key) != value:
            await turn.write(registry.set_tags, model, move.to, {key: value})


def _points(version: str | None) -> str:
    return f"points at version {version}" if version else "does not exist"


def _pointed(version: str | None) -> str:
    return f"version {version} was" if version else "no alias was"


def _no_lease(namespace: str, name: str, model: str, error: KubeError) -> ExternalError:
    message = (
        f"aliases of {model} are not written without Lease {namespace}/{name}, which cannot be had: {error}"
    )
    reason = ConditionReason.MOVE_REFUSED if error.status in _NOT_ALLOWED else ConditionReason.MLFLOW_ERROR
    return ExternalError(Problem(reason, message))
