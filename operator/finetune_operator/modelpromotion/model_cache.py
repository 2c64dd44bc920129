"""Registered models that several promotions need: each is read once in a poll interval, and again after a write."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.registry.base import RegisteredModel, Registry
from finetune_operator.settings import Settings

# A model that no promotion has read for this many poll intervals is removed from the cache.
_CACHE_POLLS = 10
# How long a cached model is fresh, in poll intervals: less than one, so that each poll reads the model again.
_FRESH_POLLS = 0.8


class _ModelKey(NamedTuple):
    """The key of a cached model. It includes the credentials, so that a promotion sees only what its own Secret may read."""

    registry_uri: str
    model: str
    credentials: str


@dataclass
class _CachedModel:
    """A registered model as one read found it.

    Attributes:
        at: when the read started.
        number: the sequence number of the read among all reads and writes.
    """

    at: float
    number: int
    model: RegisteredModel | None


@dataclass
class ModelCache:
    """Reads registered models from their registries."""

    settings: Settings
    clock: Callable[[], float]
    _models: dict[_ModelKey, _CachedModel] = field(default_factory=dict)
    _first_reads: dict[_ModelKey, asyncio.Event] = field(default_factory=dict)
    """By model that is read for the first time: set when the read has ended."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Sequence numbers for reads and writes."""
    _written: int = 0
    """The sequence number of the last write. Reads that started before it may be stale."""
    _pruned: float = 0.0
    """When old models were last removed from the cache."""

    async def read(
        self, promotion: Promotion, spec: ModelPromotionSpec, registry: Registry
    ) -> RegisteredModel | None:
        """Return the registered model of a promotion; None if it does not exist.

        Raises:
            ExternalError: the registry cannot be read.
        """
        key = _ModelKey(registry.uri, spec.model, name_credentials(promotion, spec))
        if key not in self._models and key in self._first_reads:
            # After a start, the promotions of a model are reconciled at the same time, and one of them reads the model.
            await self._first_reads[key].wait()
        cached = self._models.get(key)
        fresh_seconds = self.settings.poll_seconds * _FRESH_POLLS
        is_fresh = cached is not None and self.clock() - cached.at < fresh_seconds
        if cached and is_fresh and _is_settled(promotion, spec, cached.model):
            return cached.model
        if key in self._models:
            return await self._fetch_model(key, registry)
        ended = self._first_reads[key] = asyncio.Event()
        try:
            return await self._fetch_model(key, registry)
        finally:
            ended.set()
            if self._first_reads.get(key) is ended:
                del self._first_reads[key]

    def forget(self, registry_uri: str, model: str) -> None:
        """After a write, remove the model from the cache, and ignore the results of reads that have already started."""
        self._written = next(self._numbers)
        for key in [*self._models]:
            # Only Unity Catalog ignores case; elsewhere, a model is at most read once more.
            if (key.registry_uri, key.model.casefold()) == (registry_uri, model.casefold()):
                del self._models[key]

    async def _fetch_model(self, key: _ModelKey, registry: Registry) -> RegisteredModel | None:
        started, number = self.clock(), next(self._numbers)
        model = await asyncio.to_thread(registry.model, key.model)
        self._keep(key, _CachedModel(started, number, model))
        return model

    def _keep(self, key: _ModelKey, read: _CachedModel) -> None:
        """Cache a read, unless it is outdated. NB: a slow read may end after a newer read, or after a write that it did not see."""
        cached = self._models.get(key)
        if read.number < self._written or (cached and read.number < cached.number):
            return
        self._models[key] = read
        now, cache_seconds = self.clock(), self.settings.poll_seconds * _CACHE_POLLS
        if now - self._pruned > cache_seconds:
            self._pruned = now
            self._models = {
                name: item for name, item in self._models.items() if now - item.at <= cache_seconds
            }


def name_credentials(promotion: Promotion, spec: ModelPromotionSpec) -> str:
    """Name the credentials of a promotion: namespace/name of the Secret; empty for the chart's credentials."""
    reference = spec.tracking.secret_ref
    return f"{promotion.namespace}/{reference.name}" if reference else ""


def _is_settled(promotion: Promotion, spec: ModelPromotionSpec, model: RegisteredModel | None) -> bool:
    """Whether the alias points at the version in the status, and no move is in progress.

    NB: another replica may have moved the alias and written the status after the model was cached here. With the cached model, that
    move would look like drift.
    """
    status = promotion.status
    holder = model.holder(spec.alias) if model else None
    return status.move is None and holder == status.promoted
