"""Reads the version of another registry that a promotion copies."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.modelpromotion import ModelPromotionSpec, PromotionTracking, SourceRegistry
from finetune_operator import secrets
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.modelpromotion.model import Promotion, SourceVersion
from finetune_operator.registry.base import ModelVersion, Registry, TaggedRegistry
from finetune_operator.registry.outages import Outages
from finetune_operator.settings import Settings
from finetune_operator.text import normalize_address

# Keys of a Secret with the login of an MLflow server.
_LOGIN_KEYS = ("MLFLOW_TRACKING_",)

OpenSource = Callable[[Settings, PromotionTracking, Mapping[str, str] | None], Registry]


@dataclass
class CopyReader:
    """The versions of other registries that promotions copy, and their copies."""

    kube: Kube
    settings: Settings
    outages: Outages
    open: OpenSource

    async def read(self, promotion: Promotion, spec: ModelPromotionSpec) -> SourceVersion | None:
        """The version that the source names, with its copy if the status has it; None for a source of another type.

        A version by its number is not read again once it was copied: the other registry may be gone then.

        Raises:
            KubeError: the API server could not be reached.
        """
        source, copied = spec.source.registry, promotion.status.copied
        if source is None:
            return None
        if copied and copied.version:
            source_key = (normalize_address(source.uri), source.model, source.version)
            if (copied.uri, copied.model, copied.source_version) == source_key:
                return SourceVersion(copied.source_version, copied.digest, copy=copied.version)
        try:
            version = await self._read_source(promotion, source)
        except ExternalError as error:
            return SourceVersion(problem=error.problem)
        if version is None:
            return SourceVersion()
        digest = identify(source, version)
        copy = copied.version if copied and copied.digest == digest else None
        return SourceVersion(version.version, digest, version.ready, copy)

    async def _read_source(self, promotion: Promotion, source: SourceRegistry) -> ModelVersion | None:
        secret = await secrets.read(
            self.kube, promotion.namespace, source.secret_ref, secrets.SOURCE, _LOGIN_KEYS
        )
        tracking = PromotionTracking(uri=source.uri, secret_ref=source.secret_ref)
        server = ("source", normalize_address(source.uri), secrets.build_key(secret))
        async with self.outages.attempt(server):
            registry = self.open(self.settings, tracking, secret)
            return await asyncio.to_thread(_find_version, registry, source)


async def find_copy(registry: Registry, model: str, source: SourceVersion) -> str | None:
    """The version that is the copy of the source's version; None if there is none.

    Raises:
        ExternalError: the registry cannot be read.
    """
    if source.copy or not source.digest or not isinstance(registry, TaggedRegistry):
        return source.copy
    return await asyncio.to_thread(registry.find_tagged, model, contract.TAG_COPY, source.digest)


def identify(source: SourceRegistry, version: ModelVersion) -> str:
    """Identity of a version in 32 hexadecimal digits. NB: a registry that is set up anew counts its versions from 1 again."""
    parts = [
        normalize_address(source.uri),
        source.model,
        version.version,
        version.run_id,
        str(version.created),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _find_version(registry: Registry, source: SourceRegistry) -> ModelVersion | None:
    number = source.version
    if source.alias:
        model = registry.model(source.model)
        number = model.holder(source.alias) if model else None
    return registry.version(source.model, number) if number else None
