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
from finetune_operator.registry.choose import metastore, registry_of
from finetune_operator.serving.choose import workspace_host
from finetune_operator.settings import UNITY_CATALOG, Settings

# Problems of a registry that block a promotion until a user solves them.
_SHUT_OUT = (
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


class Other(NamedTuple):
    """Another promotion. The sort order is by age, the oldest first."""

    created: datetime
    key: str
    body: Json

    @property
    def spec(self) -> Json:
        """Its spec, which need not fit this version's schema."""
        return self.body.get("spec") or {}


@dataclass(frozen=True)
class Rivals:
    """Finds the rivals of a promotion among all promotions that the operator watches."""

    kube: Kube
    store: Store
    settings: Settings
    metastore: AskMetastore = metastore

    async def of_alias(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """The oldest other promotion for the same alias, as namespace/name, if it is older than this one.

        Raises:
            ExternalError: this promotion's workspace is not known, or cannot be reached.
        """
        mine = self._claim(spec.model_dump(mode="json", by_alias=True))
        for other in self._older(promotion, lambda spec: self._keeps(spec, mine)):
            if not _is_shut_out(other) and await self._same_registry(promotion, spec, other):
                return other.key
        return None

    async def of_endpoint(self, promotion: Promotion, wanted: DatabricksServing) -> str | None:
        """The oldest other promotion for the same endpoint, as namespace/name, if it is older than this one.

        Raises:
            ExternalError: this promotion's workspace is not known.
        """
        for other in self._older(promotion, lambda spec: _endpoint(spec) == wanted.endpoint):
            mine, theirs = wanted.secret_ref, _reference(other.spec["serving"]["databricks"])
            both = await self._secrets(promotion, mine, other, theirs, secrets.SERVING)
            if both and self._same_host(both):
                return other.key
        return None

    async def loop(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
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
        whole = spec.model_dump(mode="json", by_alias=True)
        wanted = self._claim({**whole, "alias": alias})
        for other in self._others(promotion, lambda spec: self._keeps(spec, wanted)):
            if await self._same_registry(promotion, spec, other):
                return (other.spec.get("source") or {}).get("alias")
        return None

    def _claim(self, spec: Json) -> Claim:
        registry = registry_of(self.settings, spec.get("tracking") or {})
        model, alias = str(spec.get("model")), str(spec.get("alias"))
        if registry == UNITY_CATALOG:
            model, alias = model.casefold(), alias.casefold()
        return Claim(registry, model, alias)

    def _keeps(self, spec: Json, claim: Claim) -> bool:
        # Most promotions are about other aliases: their registry is not looked up.
        return str(spec.get("alias")).casefold() == claim.alias.casefold() and self._claim(spec) == claim

    def _older(self, promotion: Promotion, matches: Callable[[Json], bool]) -> list[Other]:
        """The other promotions that match and are older, the oldest first."""
        mine = (promotion.created, promotion.key)
        return [other for other in self._others(promotion, matches) if other[:2] < mine]

    def _others(self, promotion: Promotion, matches: Callable[[Json], bool]) -> list[Other]:
        """The other promotions whose spec matches and whose deletion is not complete, the oldest first."""
        found = []
        for key, body in self.store.promotions.items():
            meta = body["metadata"]
            if meta["uid"] == promotion.uid or _is_over(meta) or not matches(body.get("spec") or {}):
                continue
            found.append(Other(datetime.fromisoformat(meta["creationTimestamp"]), "/".join(key), body))
        return sorted(found, key=lambda other: other[:2])

    async def _same_registry(self, promotion: Promotion, spec: ModelPromotionSpec, other: Other) -> bool:
        """Whether both promotions use the same registry, given that both name it by the same URI."""
        tracking = other.spec.get("tracking") or {}
        # NB: each metastore has its own Unity Catalog, and all of them have the same URI.
        if registry_of(self.settings, tracking) != UNITY_CATALOG:
            return True
        mine, theirs = spec.tracking.secret_ref, _reference(tracking)
        both = await self._secrets(promotion, mine, other, theirs, secrets.TRACKING)
        return both is not None and (self._same_host(both) or await self._same_metastore(both, other))

    async def _secrets(
        self,
        promotion: Promotion,
        mine: LocalReference | None,
        other: Other,
        theirs: LocalReference | None,
        field: str,
    ) -> tuple[Secret, Secret] | None:
        """The Databricks credentials of both promotions; None when the other has none for any workspace."""
        own = await secrets.read(self.kube, promotion.namespace, mine, field)
        workspace_host(own, self.settings)
        try:
            secret = await secrets.read(self.kube, other.key.partition("/")[0], theirs, field)
            workspace_host(secret, self.settings)
        except ExternalError:
            return None
        return own, secret

    def _same_host(self, both: tuple[Secret, Secret]) -> bool:
        mine, theirs = (workspace_host(secret, self.settings).casefold() for secret in both)
        return mine == theirs

    async def _same_metastore(self, both: tuple[Secret, Secret], other: Other) -> bool:
        """Whether two workspaces share a metastore. Unknown counts as shared, so that the younger promotion waits."""
        mine = await asyncio.to_thread(self.metastore, self.settings, both[0])
        if mine is None:
            return True
        # NB: do not wait for a workspace that is unreachable according to its own promotion.
        reachable = condition(other.body, ConditionType.REGISTRY_READY)[0] != "False"
        try:
            theirs = await asyncio.to_thread(self.metastore, self.settings, both[1], fetch=reachable)
        except ExternalError:
            return True
        return theirs is None or theirs == mine


def condition(body: Json, kind: ConditionType) -> tuple[str | None, str | None]:
    """Status and reason of a promotion's condition; None for both when it has no such condition."""
    for item in (body.get("status") or {}).get("conditions") or ():
        if item.get("type") == kind:
            return item.get("status"), item.get("reason")
    return None, None


def _is_shut_out(other: Other) -> bool:
    status, reason = condition(other.body, ConditionType.REGISTRY_READY)
    return status == "False" and reason in _SHUT_OUT


def _endpoint(spec: Json) -> object:
    return ((spec.get("serving") or {}).get("databricks") or {}).get("endpoint")


def _reference(part: Json) -> LocalReference | None:
    named = part.get("secretRef")
    return LocalReference.model_validate(named) if named else None


def _is_over(meta: Json) -> bool:
    """Whether a promotion is being deleted and no finalizer holds it to remove its alias."""
    return "deletionTimestamp" in meta and names.FINALIZER not in (meta.get("finalizers") or ())
