"""The only writer of aliases and of the tags that are set with them.

MLflow overwrites an alias without comparing. The writer therefore holds a Lease of the registered model while it reads,
compares, writes and reads again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.leases import HeldLease, Leases
from finetune_operator.errors import UNREACHABLE, ExternalError, Problem
from finetune_operator.kube import Kube, KubeError
from finetune_operator.registry.base import ModelVersion, MoveAlias, RegisteredModel, Registry
from finetune_operator.settings import UNITY_CATALOG, Settings

log = logging.getLogger(__name__)
T = TypeVar("T")

ANYWHERE = "any"
"""The value of `MoveAlias.expected` that matches whatever the alias points at."""

# NB: a request takes at most 10 s, and the client of Databricks may send two other requests first, to log in again. The rest is a margin.
_WRITE_SECONDS = 35.0
_LEASE_SECONDS = 60
# HTTP statuses for a Lease that stay the same until a role or a policy changes.
_PERMANENT_STATUSES = (400, 403, 404, 422)


class AliasMoved(ExternalError):  # noqa: N818
    """An alias does not point at the expected version: another client moved it.

    Attributes:
        alias: the alias to be moved, or the alias that the version comes from.
        actual: the version that this alias points at; None if it does not exist.
    """

    def __init__(self, model: str, alias: str, actual: str | None, expected: str | None) -> None:
        message = f"alias {alias} of {model} {_describe_current(actual)}, but {_describe_expected(expected)} is expected: the next pass reads it again"
        super().__init__(Problem(ConditionReason.ALIAS_MOVED, message))
        self.alias = alias
        self.actual = actual


class ModelReplaced(ExternalError):  # noqa: N818
    """The registered model is not the model that the decision is about, but another model of the same name."""

    def __init__(self, model: str) -> None:
        message = f"registered model {model} was recreated, or the spec points to another registry"
        super().__init__(Problem(ConditionReason.REGISTRY_CHANGED, message))


class VersionNotReady(ExternalError):  # noqa: N818
    """The version does not exist, or its files are not complete."""

    def __init__(self, model: str, version: str, why: str) -> None:
        message = (
            f"cannot point an alias at version {version} of {model}, which {why}: choose another version"
        )
        super().__init__(Problem(ConditionReason.MOVE_REFUSED, message))


@dataclass
class AliasWriter:
    """Moves aliases. Over all replicas of the operator, only one alias of a registered model is moved at a time.

    Attributes:
        identity: unique name of this process.
        clock: monotonic seconds.
        lease_seconds: how long other processes wait for a holder that died.
        write_seconds: longest duration of one request to the registry.
    """

    kube: Kube
    settings: Settings
    identity: str
    clock: Callable[[], float] = time.monotonic
    lease_seconds: int = _LEASE_SECONDS
    write_seconds: float = _WRITE_SECONDS
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By Lease name: tasks of this process wait here for each other; the Lease would refuse the second."""

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
        check_wanted: Callable[[], Awaitable[None]] | None = None,
        *,
        check_model: Callable[[RegisteredModel], Awaitable[None]] | None = None,
    ) -> None:
        """Point the alias at the version and tag it, or remove the alias, if the registry's state is still as `move` expects.

        Idempotent: tags and aliases that already have the right value are not written again. NB: tags are written after the
        alias, since they say that the version had it. After a crash in between, a move to the version that has the alias sets the tags.

        Args:
            check_wanted: called under the Lease before every write. If the move is no longer wanted, it raises an exception,
                and nothing more is written.
            check_model: called with the model as it was read under the Lease. If the alias must not be moved, it raises an exception.

        Raises:
            LeaseBusy: another process writes to the model; retry in about a second.
            AliasMoved: the alias, or the alias that the version comes from, points at another version.
            ModelReplaced: the model is not the model that the decision is about.
            VersionNotReady: the version does not exist, or its files are not complete.
            ExternalError: the registry, or the Lease, could not be read or written.
        """
        name = build_lease_name(registry.uri, model)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            lease = await self._acquire(name, model)
            session = _Session(self._leases, lease, self.clock, self.write_seconds, model, check_wanted)
            try:
                await _move(session, registry, alias, move, check_model)
            finally:
                # NB: a write without a response may still be executed, so the Lease is not released, and blocks others until it expires.
                if not session.unanswered:
                    await self._leases.release(session.lease)

    async def _acquire(self, name: str, model: str) -> HeldLease:
        try:
            return await self._leases.acquire(name, f"aliases of {model}")
        except KubeError as error:
            raise _lease_error(self._leases.namespace, name, model, error) from error


def build_lease_name(registry_uri: str, model: str) -> str:
    """Name of the Lease of a registered model: a hash, because the name of a model may contain any character."""
    if registry_uri.startswith(UNITY_CATALOG):
        # NB: names in Unity Catalog are case-insensitive.
        model = model.casefold()
    digest = hashlib.sha256(f"{registry_uri}\0{model}".encode()).hexdigest()
    return f"finetune-aliases-{digest[:32]}"


@dataclass
class _Session:
    """Calls to the registry for one model, and the Lease under which they are made.

    Attributes:
        check_wanted: raises an exception when the move is no longer wanted.
        unanswered: whether a write was sent and its result is unknown.
    """

    leases: Leases
    lease: HeldLease
    clock: Callable[[], float]
    write_seconds: float
    model: str
    check_wanted: Callable[[], Awaitable[None]] | None = None
    unanswered: bool = False

    async def write(self, call: Callable[..., None], *arguments: object) -> None:
        """Write to the registry, after renewing the Lease if it could expire before the response.

        Raises:
            LeaseBusy: the Lease expired and another process acquired it; nothing was written.
            ExternalError: the Lease could not be renewed, or the registry could not be written to.
        """
        if self.check_wanted:
            await self.check_wanted()
        if self.lease.until - self.clock() < self.write_seconds:
            await self._renew()
        self.unanswered = True
        try:
            await asyncio.to_thread(call, *arguments)
        except ExternalError as error:
            self.unanswered = error.problem.reason in UNREACHABLE
            raise
        self.unanswered = False

    async def _renew(self) -> None:
        try:
            self.lease = await self.leases.renew(self.lease)
        except KubeError as error:
            name = self.lease.body["metadata"]["name"]
            raise _lease_error(self.leases.namespace, name, self.model, error) from error


async def _move(
    session: _Session,
    registry: Registry,
    alias: str,
    move: MoveAlias,
    check_model: Callable[[RegisteredModel], Awaitable[None]] | None,
) -> None:
    """Read the model, compare it with the expected state, write, and read again to verify."""
    model = session.model
    registered = await asyncio.to_thread(registry.model, model)
    if registered and move.created and registered.created not in (None, move.created):
        raise ModelReplaced(model)
    if registered and check_model:
        await check_model(registered)
    current = registered.holder(alias) if registered else None
    # An alias that is already at its target is no error: an earlier pass may have moved it, and some tags may still be missing.
    if current != move.to and move.expected not in (ANYWHERE, current):
        raise AliasMoved(model, alias, current, move.expected)
    if move.to is None:
        if current is None:
            return
        await session.write(registry.delete_alias, model, alias)
    else:
        if move.source is not None:
            source_version = registered.holder(move.source) if registered else None
            if source_version != move.to:
                raise AliasMoved(model, move.source, source_version, move.to)
        version = await _read_ready(session, registry, move.to)
        if current != move.to:
            await session.write(registry.set_alias, model, alias, move.to)
            await _verify(session, registry, alias, move.to, current)
        await _set_tags(session, registry, version, move.tags)
        return
    await _verify(session, registry, alias, move.to, current)


async def _verify(
    session: _Session, registry: Registry, alias: str, expected: str | None, before: str | None
) -> None:
    """Read the alias after it was written.

    Raises:
        AliasMoved: it points at another version.
    """
    model = session.model
    written = await asyncio.to_thread(registry.model, model)
    after = written.holder(alias) if written else None
    if after != expected:
        raise AliasMoved(model, alias, after, expected)
    log.info(
        "alias %s of %s %s; before, it %s", alias, model, _describe_current(after), _describe_previous(before)
    )


async def _read_ready(session: _Session, registry: Registry, number: str) -> ModelVersion:
    """Read the version, which must exist and be ready."""
    version = await asyncio.to_thread(registry.version, session.model, number)
    if version is None:
        raise VersionNotReady(session.model, number, "does not exist")
    if not version.ready:
        raise VersionNotReady(session.model, number, "is not READY")
    return version


async def _set_tags(
    session: _Session, registry: Registry, version: ModelVersion, tags: Mapping[str, str]
) -> None:
    """Set the tags that the version lacks."""
    for key, value in tags.items():
        if version.tags.get(key) != value:
            await session.write(registry.set_tags, session.model, version.version, {key: value})


def _describe_current(version: str | None) -> str:
    return f"points at version {version}" if version else "does not exist"


def _describe_previous(version: str | None) -> str:
    return f"pointed at version {version}" if version else "did not exist"


def _describe_expected(version: str | None) -> str:
    return f"version {version}" if version else "no alias"


def _lease_error(namespace: str, name: str, model: str, error: KubeError) -> ExternalError:
    message = (
        f"cannot acquire Lease {namespace}/{name}, which is required to write aliases of {model}: {error}"
    )
    # MLFLOW_ERROR: the problem may end by itself, and the move is tried again.
    reason = (
        ConditionReason.MOVE_REFUSED if error.status in _PERMANENT_STATUSES else ConditionReason.MLFLOW_ERROR
    )
    return ExternalError(Problem(reason, message))
