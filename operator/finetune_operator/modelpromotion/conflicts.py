"""Conflicts between promotions: of those with the same alias or endpoint, only the oldest acts; aliases must not be each other's source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pydantic import ValidationError

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import LocalReference
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.serving import Serving
from finetune_operator import names, secrets
from finetune_operator.controller.promotion_index import Key, find_endpoint
from finetune_operator.controller.store import Store
from finetune_operator.databricks.access import find_workspace
from finetune_operator.errors import ExternalError
from finetune_operator.kube import Kube
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.policy.status import read_condition
from finetune_operator.registry.choose import find_metastore, resolve_registry
from finetune_operator.serving.choose import choose_backend
from finetune_operator.serving.model import ServingBackend
from finetune_operator.settings import UNITY_CATALOG, Settings

# Problems with a registry that block a promotion until a user solves them.
_BLOCKING_REASONS = (
    ConditionReason.MLFLOW_FORBIDDEN,
    ConditionReason.DATABRICKS_FORBIDDEN,
    ConditionReason.DATABRICKS_NOT_CONFIGURED,
)

# The decoded credentials of a Secret, by key; None for the chart's credentials.
Secret = Mapping[str, str] | None
# Has the parameters of `find_metastore`.
AskMetastore = Callable[..., str | None]


class Claim(NamedTuple):
    """The alias that a promotion manages, with normalized names."""

    registry: str
    model: str
    alias: str


class Login(NamedTuple):
    """The credentials of a promotion, and the address of their server."""

    address: str
    secret: Secret


class Logins(NamedTuple):
    """The logins of this promotion and of the other one."""

    this: Login
    rival: Login

    @property
    def have_same_address(self) -> bool:
        """Whether both log in to the same server."""
        return self.this.address == self.rival.address


class Rival(NamedTuple):
    """Another promotion. `key` is namespace/name."""

    created: datetime
    key: str
    body: Json

    @property
    def sort_key(self) -> tuple[datetime, str]:
        """Sorts the oldest promotion first. The key decides between promotions of the same second."""
        return self.created, self.key

    @property
    def spec(self) -> Json:
        """The spec of the other promotion. The spec may not fit the schema of this version of the operator."""
        return self.body.get("spec") or {}


@dataclass(frozen=True)
class ConflictFinder:
    """Finds conflicts of a promotion among all promotions that the operator watches."""

    kube: Kube
    store: Store
    settings: Settings
    metastore: AskMetastore = find_metastore

    async def find_alias_conflict(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """The oldest promotion that manages the same alias, as namespace/name; None if this promotion is the oldest.

        Raises:
            ExternalError: this promotion's workspace is not known, or cannot be reached.
        """
        claim = self._build_claim(spec.model_dump(mode="json", by_alias=True))
        keys = self.store.promotion_index.of_model(claim.model)
        for rival in self._list_older(promotion, keys, lambda rival_spec: self._manages(rival_spec, claim)):
            # A promotion that cannot use its registry until a user acts does not manage the alias.
            if not _is_blocked(rival) and await self._is_same_registry(promotion, spec, rival):
                return rival.key
        return None

    async def find_endpoint_conflict(self, promotion: Promotion, backend: ServingBackend) -> str | None:
        """The oldest promotion for the same endpoint, as namespace/name; None if this promotion is the oldest.

        Raises:
            ExternalError: the server of this promotion's endpoint is not known.
        """
        keys = self.store.promotion_index.of_endpoint(backend.spec.endpoint)
        for rival in self._list_older(promotion, keys, lambda spec: _names_endpoint(spec, backend.spec)):
            rival_backend = _read_backend(rival.spec)
            if rival_backend is None:
                continue
            logins = await self._read_logins(
                promotion,
                rival,
                backend.secret_ref,
                rival_backend.secret_ref,
                field=backend.secret_field,
                find_address=backend.find_address,
            )
            if logins and logins.have_same_address:
                return rival.key
        return None

    async def find_alias_loop(self, promotion: Promotion, spec: ModelPromotionSpec) -> str | None:
        """A message about a cycle of aliases that take their version from each other, if this promotion's alias is in one.

        For example, `champion` takes its version from `challenger`, and `challenger` from `champion`.

        Raises:
            ExternalError: this promotion's workspace is not known, or cannot be reached.
        """
        path, source = [spec.alias], spec.source.alias
        while source and source not in path:
            path.append(source)
            source = await self._find_source_alias(promotion, spec, source)
        if source != spec.alias:
            # The chain ends, or it leads into a cycle without this alias, which the promotions of that cycle report.
            return None
        return f"aliases {' <- '.join([*path, source])} use each other as their source"

    async def _find_source_alias(
        self, promotion: Promotion, spec: ModelPromotionSpec, alias: str
    ) -> str | None:
        """The alias that `alias`, of the same model, takes its version from; None if no promotion gives `alias` a source alias."""
        spec_json = spec.model_dump(mode="json", by_alias=True)
        claim = self._build_claim({**spec_json, "alias": alias})
        keys = self.store.promotion_index.of_model(claim.model)
        for rival in self._list_others(promotion, keys, lambda rival_spec: self._manages(rival_spec, claim)):
            if await self._is_same_registry(promotion, spec, rival):
                return (rival.spec.get("source") or {}).get("alias")
        return None

    def _build_claim(self, spec: Json) -> Claim:
        """The alias that a spec manages."""
        registry = resolve_registry(self.settings, spec.get("tracking") or {})
        model, alias = str(spec.get("model")), str(spec.get("alias"))
        if registry == UNITY_CATALOG:
            model, alias = model.casefold(), alias.casefold()
        return Claim(registry, model, alias)

    def _manages(self, spec: Json, claim: Claim) -> bool:
        """Whether a spec, as in `Rival.spec`, manages the alias of a claim."""
        # Compare the alias first: most promotions are about other aliases, and the full comparison resolves the registry.
        return (
            str(spec.get("alias")).casefold() == claim.alias.casefold() and self._build_claim(spec) == claim
        )

    def _list_older(
        self, promotion: Promotion, keys: Iterable[Key], matches: Callable[[Json], bool]
    ) -> list[Rival]:
        """The matching promotions (see `_list_others`) that are older than this one, the oldest first."""
        sort_key = (promotion.created, promotion.key)
        return [rival for rival in self._list_others(promotion, keys, matches) if rival.sort_key < sort_key]

    def _list_others(
        self, promotion: Promotion, keys: Iterable[Key], matches: Callable[[Json], bool]
    ) -> list[Rival]:
        """The promotions with these keys whose spec matches, without this promotion and without ending ones, the oldest first."""
        rivals = []
        for key in keys:
            body = self.store.promotions[key]
            meta = body["metadata"]
            if meta["uid"] == promotion.uid or _is_ending(meta) or not matches(body.get("spec") or {}):
                continue
            if read_condition(body, ConditionType.ACCEPTED) == ("False", ConditionReason.NOT_PERMITTED):
                # NB: otherwise anybody could occupy the alias of another tenant by being the oldest.
                continue
            rivals.append(Rival(datetime.fromisoformat(meta["creationTimestamp"]), "/".join(key), body))
        return sorted(rivals, key=lambda rival: rival.sort_key)

    async def _is_same_registry(self, promotion: Promotion, spec: ModelPromotionSpec, rival: Rival) -> bool:
        """Whether both promotions use the same registry, given that both name it by the same URI; False if the rival has no usable login."""
        tracking = rival.spec.get("tracking") or {}
        # NB: each metastore has its own Unity Catalog, all with the same URI; any other URI identifies a registry.
        if resolve_registry(self.settings, tracking) != UNITY_CATALOG:
            return True
        logins = await self._read_logins(
            promotion,
            rival,
            spec.tracking.secret_ref,
            _parse_reference(tracking),
            field=secrets.TRACKING,
            find_address=find_workspace,
        )
        if logins is None:
            return False
        return logins.have_same_address or await self._is_same_metastore(logins, rival)

    async def _read_logins(
        self,
        promotion: Promotion,
        rival: Rival,
        reference: LocalReference | None,
        rival_reference: LocalReference | None,
        *,
        field: str,
        find_address: Callable[[Settings, Secret], str],
    ) -> Logins | None:
        """The logins of both promotions; None if the other promotion has no usable login.

        Args:
            reference: the Secret of this promotion.
            rival_reference: the Secret of the other one.
            field: the field of the spec that names the Secret.
            find_address: returns the server address for a Secret.
        """
        login = await self._read_login(promotion.namespace, reference, field, find_address)
        rival_namespace, _, _ = rival.key.partition("/")
        try:
            rival_login = await self._read_login(rival_namespace, rival_reference, field, find_address)
        except ExternalError:
            return None
        return Logins(login, rival_login)

    async def _read_login(
        self,
        namespace: str,
        reference: LocalReference | None,
        field: str,
        find_address: Callable[[Settings, Secret], str],
    ) -> Login:
        secret = await secrets.read(self.kube, namespace, reference, field)
        return Login(find_address(self.settings, secret), secret)

    async def _is_same_metastore(self, logins: Logins, rival: Rival) -> bool:
        """Whether two workspaces share a metastore. An unknown metastore is treated as shared, so that the younger promotion waits."""
        metastore_id = await asyncio.to_thread(self.metastore, self.settings, logins.this.secret)
        if metastore_id is None:
            return True
        # NB: do not contact a workspace that is unreachable according to its own promotion.
        registry_ready, _ = read_condition(rival.body, ConditionType.REGISTRY_READY)
        try:
            rival_metastore_id = await asyncio.to_thread(
                self.metastore, self.settings, logins.rival.secret, fetch=registry_ready != "False"
            )
        except ExternalError:
            return True
        return rival_metastore_id is None or rival_metastore_id == metastore_id


def _is_blocked(rival: Rival) -> bool:
    status, reason = read_condition(rival.body, ConditionType.REGISTRY_READY)
    return status == "False" and reason in _BLOCKING_REASONS


def _names_endpoint(spec: Json, serving: Serving) -> bool:
    """Whether a spec, as in `Rival.spec`, names an endpoint of the same type and name."""
    rival_serving = spec.get("serving") or {}
    return (rival_serving.get("type"), find_endpoint(rival_serving)) == (serving.type, serving.endpoint)


def _read_backend(spec: Json) -> ServingBackend | None:
    """The backend of a promotion; None if its spec.serving is invalid: such a promotion changes no endpoint."""
    serving = spec["serving"]
    try:
        return choose_backend(Serving.model_validate(serving | {"endpoint": find_endpoint(serving)}))
    except ValidationError:
        return None


def _parse_reference(part: Json) -> LocalReference | None:
    reference = part.get("secretRef")
    return LocalReference.model_validate(reference) if reference else None


def _is_ending(meta: Json) -> bool:
    """Whether a promotion is being deleted and no longer manages its alias. With the finalizer, it still has to remove the alias."""
    return "deletionTimestamp" in meta and names.FINALIZER not in (meta.get("finalizers") or ())
