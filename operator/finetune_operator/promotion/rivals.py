"""Promotions that want the same alias, or the same endpoint: the oldest has it, the others say so and wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from finetune_crds.env import LocalReference
from finetune_crds.modelpromotion import ModelPromotionSpec, PromotionTracking
from finetune_crds.serving import DatabricksServing
from finetune_operator import secrets
from finetune_operator.kube import Kube
from finetune_operator.mlflow_host import canonical
from finetune_operator.model import Json
from finetune_operator.promotion.model import Promotion
from finetune_operator.serving.choose import workspace_host
from finetune_operator.settings import UNITY_CATALOG, Settings
from finetune_operator.store import Store
from finetune_operator.tracking import TrackingError


@dataclass(frozen=True)
class Rivals:
    """Finds them among all promotions that the operator sees."""

    kube: Kube
    store: Store
    settings: Settings

    async def of_alias(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """The oldest other promotion for the same alias, as namespace/name, if it is older than this one.

        Raises:
            TrackingError: this promotion's workspace is not known.
        """
        mine = canonical(self.settings.servers(spec.tracking)[1])
        for other, theirs in self._older(promotion, lambda body: _alias(body) == (spec.model, spec.alias)):
            tracking = theirs.get("tracking") or {}
            if registry_of(self.settings, tracking) != mine:
                continue
            # NB: each workspace has a Unity Catalog, and all of them go by one name.
            references = spec.tracking.secret_ref, _reference(tracking)
            if mine != UNITY_CATALOG or await self._same(promotion, other, references, secrets.TRACKING):
                return other
        return None

    async def of_endpoint(self, promotion: Promotion, wanted: DatabricksServing) -> str | None:
        """The oldest other promotion for the same endpoint, as namespace/name, if it is older than this one.

        Raises:
            TrackingError: this promotion's workspace is not known.
        """
        for other, theirs in self._older(promotion, lambda spec: _endpoint(spec) == wanted.endpoint):
            references = wanted.secret_ref, _reference(theirs["serving"]["databricks"])
            if await self._same(promotion, other, references, secrets.SERVING):
                return other
        return None

    def _older(self, promotion: Promotion, is_like: Callable[[Json], bool]) -> list[tuple[str, Json]]:
        """Promotions whose spec is like it, which are older and stay, the oldest first."""
        mine = (promotion.created, promotion.key)
        found = []
        for key, body in self.store.promotions.items():
            meta, spec = body["metadata"], body.get("spec") or {}
            if meta["uid"] == promotion.uid or "deletionTimestamp" in meta or not is_like(spec):
                continue
            made = (datetime.fromisoformat(meta["creationTimestamp"]), "/".join(key))
            if made < mine:
                found.append((made, spec))
        return [(made[1], spec) for made, spec in sorted(found, key=lambda item: item[0])]

    async def _same(
        self,
        promotion: Promotion,
        other: str,
        references: tuple[LocalReference | None, LocalReference | None],
        field: str,
    ) -> bool:
        """Whether both mean the same Databricks workspace; each names a Secret, or none."""
        mine, theirs = references
        host = workspace_host(await secrets.read(self.kube, promotion.namespace, mine, field), self.settings)
        try:
            secret = await secrets.read(self.kube, other.partition("/")[0], theirs, field)
            return workspace_host(secret, self.settings) == host
        except TrackingError:
            # The other cannot get at any.
            return False


def registry_of(settings: Settings, tracking: Json) -> str:
    """The registry of a promotion or of a FineTuneJob with this spec.tracking."""
    # NB: what another version of the operator let through may not fit this one's schema.
    known = PromotionTracking.model_construct(
        uri=tracking.get("uri"), registry_uri=tracking.get("registryUri")
    )
    return canonical(settings.servers(known)[1])


def _alias(spec: Json) -> tuple[object, object]:
    return spec.get("model"), spec.get("alias")


def _endpoint(spec: Json) -> object:
    return ((spec.get("serving") or {}).get("databricks") or {}).get("endpoint")


def _reference(part: Json) -> LocalReference | None:
    named = part.get("secretRef")
    return LocalReference.model_validate(named) if named else None
