"""Whether the promotion can be carried out: its spec is valid, a registry is configured, and no other promotion conflicts with it."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.modelpromotion import ModelPromotionSpec, SourceRegistry
from finetune_operator import names
from finetune_operator.modelpromotion.decide import windows
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.version_records import forget_moves
from finetune_operator.policy.address import find_passwords
from finetune_operator.policy.cron import CronError
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.policy.unity_catalog import find_wrong_tags
from finetune_operator.registry.ownership import LEASE_SECONDS
from finetune_operator.serving.model import ServingBackend
from finetune_operator.settings import DATABRICKS, UNITY_CATALOG, Settings
from finetune_operator.text import normalize_address

_NO_REGISTRY = (
    "no model registry is configured: install the chart with tracking.uri, or create a ModelPromotion with another name and "
    "spec.tracking.registryUri"
)


def require_permission(draft: Draft) -> Outcome:
    """Refuse the promotion if the tenancy does not permit it."""
    refusal = draft.observed.refusal
    return _refuse(draft, refusal.reason, refusal.message) if refusal else Continue


def accept(draft: Draft) -> Outcome:
    """Accept the promotion, or refuse it: for all mistakes in its spec, in one message, or for the first of the other reasons."""
    if draft.promotion.spec is None:
        return _refuse(
            draft, ConditionReason.INVALID_SPEC, draft.promotion.invalid or "the spec cannot be read"
        )
    draft.update(model=draft.spec.model)
    messages = [*mistakes(draft.spec, draft.promotion.backend, draft.settings)]
    if messages:
        return _refuse(draft, ConditionReason.INVALID_SPEC, "; ".join(messages))
    _, registry = draft.settings.servers(draft.spec.tracking)
    if not registry:
        return _refuse(draft, ConditionReason.MLFLOW_NOT_CONFIGURED, _NO_REGISTRY)
    conflict = _find_conflict(draft)
    if conflict:
        draft.update(current=None)
        if draft.observed.rival:
            # Moves by the other promotion are not drift: when it is deleted, this promotion starts from where the alias is then.
            draft.update(promoted=None, watch_start_time=None)
            draft.remember(move=None, abandoned=None)
            draft.status = forget_moves(draft.status)
        # NB: everybody who may tag the model can write the tag of another installation for a moment. So nothing else is forgotten, and the
        # moves of another installation are judged as drift once it is gone.
        return _refuse(draft, ConditionReason.CONFLICT, conflict)
    if draft.observed.loop:
        message = f"{draft.observed.loop}: change the source of one of them"
        return _refuse(draft, ConditionReason.CONFLICT, message)
    draft.set(ConditionType.ACCEPTED, True, ConditionReason.ACCEPTED, "the spec can be carried out")
    return Continue


def _find_conflict(draft: Draft) -> str | None:
    """A message about another promotion that manages the alias; None if there is none."""
    alias, observed = f"alias {draft.spec.alias} of {draft.spec.model}", draft.observed
    if observed.rival:
        return f"ModelPromotion {observed.rival} is older and manages {alias}: delete one of the two"
    if observed.ownership.state == "Foreign":
        return (
            f"{observed.ownership.owner} manages {alias} in this registry: delete one of the two; this one takes over "
            f"{LEASE_SECONDS / 60:.0f} min after the other installation has stopped. If that installation no longer exists, delete the "
            f"tag {names.owner_tag(draft.spec.alias)} of the registered model"
        )
    return None


def _refuse(draft: Draft, reason: ConditionReason, message: str) -> Outcome:
    draft.set(ConditionType.ACCEPTED, False, reason, message)
    draft.stop(reason, message)
    return Stop


def mistakes(spec: ModelPromotionSpec, backend: ServingBackend | None, settings: Settings) -> Iterator[str]:
    """A message for each mistake that the schema cannot detect."""
    server, registry = settings.servers(spec.tracking)
    yield from find_passwords(spec.tracking)
    yield from _find_wrong_windows(spec)
    if spec.source.registry:
        yield from _find_wrong_copy(spec, spec.source.registry, server, registry)
    if backend:
        yield from backend.find_mistakes(registry)
    if registry == UNITY_CATALOG:
        if spec.tracking.uri not in (None, DATABRICKS):
            yield (
                f"runs of models in Unity Catalog are read from their workspace: create a ModelPromotion with another name and "
                f"spec.tracking.uri {DATABRICKS}, or without spec.tracking.uri"
            )
        if spec.model.count(".") != 2 or not all(spec.model.split(".")):
            yield f"spec.model {spec.model} must be catalog.schema.name in Unity Catalog"
        yield from find_wrong_tags(spec.tags, "spec.tags")
    elif registry and not registry.startswith(("http://", "https://")):
        yield (
            f"the registry {registry} in spec.tracking.registryUri is not supported: create a ModelPromotion with another name and "
            f"the http or https address of an MLflow server, or {UNITY_CATALOG}"
        )
    elif server and not server.startswith(("http://", "https://")):
        yield (
            f"the tracking server {server} in spec.tracking.uri is not supported with the registry {registry}: create a ModelPromotion "
            "with another name and an http or https address"
        )


def _find_wrong_copy(
    spec: ModelPromotionSpec, source: SourceRegistry, server: str, registry: str
) -> Iterator[str]:
    """A message for each reason why the source's version cannot be copied into the registry."""
    if DATABRICKS in (server, registry) or registry == UNITY_CATALOG:
        yield (
            "spec.source.type Registry copies into the registry of an MLflow server, not into Unity Catalog: copy the version with "
            "MLflow's client, and set spec.source.version to the copy"
        )
    elif registry and not server:
        yield (
            "spec.source.type Registry needs a tracking server for the files of the copy: create a ModelPromotion with another name and "
            "spec.tracking.uri"
        )
    elif normalize_address(source.uri) == normalize_address(registry) and source.model == spec.model:
        yield (
            f"spec.source.registry names model {spec.model} of the registry that the version would be copied to: set spec.source.type to "
            "Version or Alias"
        )


def _find_wrong_windows(spec: ModelPromotionSpec) -> Iterator[str]:
    for window in spec.windows:
        try:
            windows.parse(window)
        except CronError as error:
            yield str(error)
