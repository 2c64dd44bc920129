"""Promotions of the same alias or endpoint: the oldest keeps it, the others report a conflict and wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import LocalReference
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.serving import DatabricksServing
from finetune_operator import names, secrets
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.registry.choose import find_metastore, resolve_registry
from finetune_operator.serving.choose import workspace_host
from finetune_operator.settings import UNITY_CATALOG, Settings

# Problems of a registry that block a promotion until a user solves them.
_BLOCKING_REASONS = (
    ConditionReason.MLFLOW_FORBIDDEN,
    ConditionReason.DATABRICKS_FORBIDDEN,
    ConditionReason.DATABRICKS_NOT_CONFIGURED,
)

Secret = Mapping[str, str] | None
AskMetastore = Callable[..., str | None]


class Claim(NamedTuple):
    """The alias that a promotion manages, normalized."""

    registry: str
    model: str
    alias: str


class Rival(NamedTuple):
    """Another promotion. The sort order is by age, the oldest first."""

    created: datetime
    key: str
    body: Json

    @property
    def spec(self) -> Json:
        """Its spec, which need not fit this version's schema."""
        return self.body.get("spec") or {}


@dataclass(frozen=True)
class ConflictFinder:
    """Finds conflicts of a promotion among all promotions that the operator watches."""

    kube: Kube
    store: Store
    settings: Settings
    metastore: AskMetastore = find_metastore

    async def find_alias_conflict(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """The oldest other promotion for the same alias, as namespace/name, if it is older than this one.

        Raises:
            ExternalError: this promotion's workspace is not known, or cannot be reached.
        """
        claim = self._claim(spec.model_dump(mode="json", by_alias=True))
        for rival in self._older(promotion, lambda spec: self._keeps(spec, claim)):
            if not _is_blocked(rival) and await self._same_registry(promotion, spec, rival):
                return rival.key
        return None

    async def find_endpoint_conflict(self, promotion: Promotion, serving: DatabricksServing) -> str | None:
        """The oldest other promotion for the same endpoint, as namespace/name, if it is older than this one.

        Raises:
            ExternalError: this promotion's workspace is not known.
        """
        for rival in self._older(promotion, lambda spec: _endpoint(spec) == serving.endpoint):
            secret, rival_secret = serving.secret_ref, _reference(rival.spec["serving"]["databricks"])
            both = await self._secrets(promotion, secret, rival, rival_secret, secrets.SERVING)
            if both and self._same_host(both):
                return rival.key
        return None

    async def find_alias_loop(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """The cycle of aliases that take their version from each other, as text, if this promotion's is in one.

        Raises:
            ExternalError: this promotion's workspace is not known, or cannot be reached.
        """
        path, source = [spec.alias], spec.source.alias
        while source and source not in path:
            path.append(source)
            source = await self._source(promotion, spec, source)
        if source != spec.alias:
            return None
        return f"aliases {' <- '.join([*path, source])} take their version from each other"

    async def _source(self, promotion: Promotion, spec: ModelPromotionSpec, alias: str) -> str | None:
        """The alias that another alias of the same model takes its version from."""
        spec_json = spec.model_dump(mode="json", by_alias=True)
        claim = self._claim({**spec_json, "alias": alias})
        for rival in self._others(promotion, lambda spec: self._keeps(spec, claim)):
            if await self._same_registry(promotion, spec, rival):
                return (rival.spec.get("source") or {}).get("alias")
        return None

    def _claim(self, spec: Json) -> Claim:
        registry = resolve_registry(self.settings, spec.get("tracking") or {})
        model, alias = str(spec.get("model")), str(spec.get("alias"))
        if registry == UNITY_CATALOG:
            model, alias = model.casefold(), alias.casefold()
        return Claim(registry, model, alias)

    def _keeps(self, spec: Json, claim: Claim) -> bool:
        # Most promotions are about other aliases: their registry is not looked up.
        return str(spec.get("alias")).casefold() == claim.alias.casefold() and self._claim(spec) == claim

    def _older(self, promotion: Promotion, matches: Callable[[Json], bool]) -> list[Rival]:
        """The other promotions that match and are older, the oldest first."""
        age = (promotion.created, promotion.key)
        return [rival for rival in self._others(promotion, matches) if rival[:2] < age]

    def _others(self, promotion: Promotion, matches: Callable[[Json], bool]) -> list[Rival]:
        """The other promotions whose spec matches and whose deletion is not complete, the oldest first."""
        rivals = []
        for key, body in self.store.promotions.items():
            meta = body["metadata"]
            if meta["uid"] == promotion.uid or _is_ending(meta) or not matches(body.get("spec") or {}):
                continue
            rivals.append(Rival(datetime.fromisoformat(meta["creationTimestamp"]), "/".join(key), body))
        return sorted(rivals, key=lambda rival: rival[:2])

    async def _same_registry(self, promotion: Promotion, spec: ModelPromotionSpec, rival: Rival) -> bool:
        """Whether both promotions use the same registry, given that both name it by the same URI."""
        tracking = rival.spec.get("tracking") or {}
        # NB: each metastore has its own Unity Catalog, and all of them have the same URI.
        if resolve_registry(self.settings, tracking) != UNITY_CATALOG:
            return True
        secret, rival_secret = spec.tracking.secret_ref, _reference(tracking)
        both = await self._secrets(promotion, secret, rival, rival_secret, secrets.TRACKING)
        return both is not None and (self._same_host(both) or await self._same_metastore(both, rival))

    async def _secrets(
        self,
        promotion: Promotion,
        reference: LocalReference | None,
        rival: Rival,
        rival_reference: LocalReference | None,
        field: str,
    ) -> tuple[Secret, Secret] | None:
        """The Databricks credentials of both promotions; None when the other has none for any workspace."""
        secret = await secrets.read(self.kube, promotion.namespace, reference, field)
        workspace_host(secret, self.settings)
        try:
            rival_secret = await secrets.read(self.kube, rival.key.partition("/")[0], rival_reference, field)
            workspace_host(rival_secret, self.settings)
        except ExternalError:
            return None
        return secret, rival_secret

    def _same_host(self, both: tuple[Secret, Secret]) -> bool:
        host, rival_host = (workspace_host(secret, self.settings).casefold() for secret in both)
        return host == rival_host

    async def _same_metastore(self, both: tuple[Secret, Secret], rival: Rival) -> bool:
        """Whether two workspaces share a metastore. Unknown counts as shared, so that the younger promotion waits."""
        metastore_id = await asyncio.to_thread(self.metastore, self.settings, both[0])
        if metastore_id is None:
            return True
        # NB: do not wait for a workspace that is unreachable according to its own promotion.
        reachable = condition_state(rival.body, ConditionType.REGISTRY_READY)[0] != "False"
        try:
            rival_metastore_id = await asyncio.to_thread(
                self.metastore, self.settings, both[1], fetch=reachable
            )
        except ExternalError:
            return True
        return rival_metastore_id is None or rival_metastore_id == metastore_id


def condition_state(body: Json, kind: ConditionType) -> tuple[str | None, str | None]:
    """Status and reason of a promotion's condition; None for both when it has no such condition."""
    for item in (body.get("status") or {}).get("conditions") or ():
        if item.get("type") == kind:
            return item.get("status"), item.get("reason")
    return None, None


def _is_blocked(rival: Rival) -> bool:
    status, reason = condition_state(rival.body, ConditionType.REGISTRY_READY)
    return status == "False" and reason in _BLOCKING_REASONS


def _endpoint(spec: Json) -> object:
    return ((spec.get("serving") or {}).get("databricks") or {}).get("endpoint")


def _reference(part: Json) -> LocalReference | None:
    reference = part.get("secretRef")
    return LocalReference.model_validate(reference) if reference else None


def _is_ending(meta: Json) -> bool:
    """Whether a promotion is being deleted and no finalizer holds it to remove its alias."""
    return "deletionTimestamp" in meta and names.FINALIZER not in (meta.get("finalizers") or ())
