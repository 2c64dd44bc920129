"""The aliases of a FineTuneJob's model that ModelPromotions manage. The job does not set these aliases."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionType
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.registry.base import is_same_name
from finetune_operator.registry.choose import resolve_registry
from finetune_operator.settings import Settings
from finetune_operator.text import normalize_address


def promoted_aliases(store: Store, settings: Settings, ftj: FineTuneJob) -> dict[str, str]:
    """The ModelPromotions that manage aliases of the job in its registry: namespace/name, by the alias as the job spells it."""
    if ftj.spec is None or ftj.spec.register_ is None:
        return {}
    registration = ftj.spec.register_
    _server, registry_uri = settings.servers(ftj.spec.tracking)
    registry = normalize_address(registry_uri)
    promotions: dict[str, str] = {}
    for key in store.promotion_index.of_model(registration.model):
        namespace, name = key
        body = store.promotions[key]
        spec = body.get("spec") or {}
        # The index ignores case, but of the registries only Unity Catalog does.
        if not is_same_name(registry, str(spec.get("model")), registration.model):
            continue
        is_same_registry = resolve_registry(settings, spec.get("tracking") or {}) == registry
        if is_same_registry and _manages_alias(body):
            for alias in registration.aliases:
                if is_same_name(registry, alias, str(spec.get("alias"))):
                    promotions.setdefault(alias, f"{namespace}/{name}")
    return promotions


def _manages_alias(promotion: Json) -> bool:
    """Whether a promotion manages its alias: it is accepted, is not being deleted, and its registry has answered at least once."""
    status = promotion.get("status") or {}
    states = {item["type"]: item["status"] for item in status.get("conditions") or ()}
    is_accepted = states.get(ConditionType.ACCEPTED) == "True"
    is_being_deleted = "deletionTimestamp" in promotion["metadata"]
    has_answer = states.get(ConditionType.REGISTRY_READY) == "True" or status.get("promoted") is not None
    return is_accepted and not is_being_deleted and has_answer
