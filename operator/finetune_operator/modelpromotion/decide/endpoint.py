"""The endpoint as Databricks reports it, compared with the spec and with the change that the status records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import DatabricksServing, Route
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.serving.model import Endpoint, ServedVersion, workload
from finetune_operator.settings import UNITY_CATALOG


def spec_of(draft: Draft) -> DatabricksServing | None:
    """spec.serving.databricks, or None."""
    return draft.spec.serving.databricks if draft.spec.serving else None


def name_of(draft: Draft) -> str:
    """The name of the endpoint; empty when the spec has none."""
    spec = spec_of(draft)
    return spec.endpoint if spec else ""


def note(draft: Draft, **fields: Any) -> None:
    """Set fields of status.serving."""
    draft.update(serving=canary.known_of(draft).model_copy(update=fields))


def describe(draft: Draft, spec: DatabricksServing) -> Endpoint | None:
    """The endpoint, copied into the status; None when it cannot be read, or serves another model."""
    endpoint = draft.observed.endpoint
    if endpoint is None:
        return None
    if endpoint.problem:
        draft.set(ConditionType.SERVED, None, endpoint.problem.reason, endpoint.problem.message)
        draft.requeue_after(draft.settings.poll_seconds)
        return None
    if canary.known_of(draft).endpoint not in (None, spec.endpoint):
        # The status is about another endpoint.
        draft.update(serving=None)
    note(
        draft,
        endpoint=spec.endpoint,
        url=endpoint.url,
        state=_state(endpoint),
        routes=in_force(endpoint.served) or None,
    )
    return None if _is_foreign(draft, spec, endpoint) else endpoint


def _state(endpoint: Endpoint) -> str:
    if not endpoint.exists:
        return "Missing"
    if endpoint.updating:
        return "Updating"
    if endpoint.failed:
        return "UpdateFailed"
    return "Ready" if endpoint.ready else "NotReady"


def _is_foreign(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> bool:
    """NB: the endpoint of another model is never overwritten, since the name in the spec may be a mistake."""
    served = {item.model for item in (*endpoint.served, *endpoint.pending)}
    others = {name for name in served if not _is_same_model(draft, name)}
    if not others:
        return False
    what = " and ".join(
        sorted(f"the model {name}" if name else "another provider's model" for name in others)
    )
    message = (
        f"endpoint {spec.endpoint} serves {what}, and is left alone: set spec.serving.databricks.endpoint to another "
        "name, or delete it"
    )
    draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_FAILED, message)
    return True


def _is_same_model(draft: Draft, name: str) -> bool:
    model, registry = draft.spec.model, draft.settings.servers(draft.spec.tracking)[1]
    # Names in Unity Catalog are case-insensitive.
    return name.casefold() == model.casefold() if registry == UNITY_CATALOG else name == model


def is_ours(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    """Whether the change that is in progress at Databricks, or failed there, is the one that the status records."""
    change = canary.known_of(draft).change
    if change is None or not same(change.routes, wanted) or change.settings != settings_digest(draft):
        return False
    pending = in_force(endpoint.pending)
    if pending and not same(pending, wanted):
        return False
    return endpoint.revision != change.revision or (endpoint.revision is None and bool(pending))


def has_failed(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    """Whether the change to these routes failed at Databricks."""
    return endpoint.failed and not endpoint.updating and is_ours(draft, endpoint, wanted)


def is_in_place(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    """Whether the endpoint has these routes and the settings of the spec."""
    if not endpoint.exists or not same(in_force(endpoint.served), wanted):
        return False
    known, settings = canary.known_of(draft), settings_digest(draft)
    if endpoint.revision is None or (known.settings is None and known.change is None):
        return endpoint.matches_spec
    if is_ours(draft, endpoint, wanted):
        # Databricks applied the change, even if it reports the settings in another form.
        return True
    return known.settings == settings and (endpoint.matches_spec or endpoint.revision == known.revision)


def settings_digest(draft: Draft) -> str:
    """Digest of the endpoint's spec except for the versions that it serves."""
    spec = spec_of(draft)
    if spec is None:
        return ""
    reserved = spec.provisioned_throughput
    machines = reserved.to_json() if reserved else dataclasses.asdict(workload(spec))
    known = {name: value for name, value in machines.items() if value is not None}
    return digest([known, dict(spec.environment)])


def in_force(served: Sequence[ServedVersion]) -> list[Route]:
    """The share of each version, the largest first."""
    shares: dict[str, int] = {}
    for item in served:
        shares[item.version] = shares.get(item.version, 0) + item.percent
    routes = [Route(version=version, percent=percent) for version, percent in shares.items()]
    return sorted(routes, key=lambda route: -route.percent)


def same(one: Sequence[Route], other: Sequence[Route]) -> bool:
    """Whether both give each version the same share."""
    return {item.version: item.percent for item in one} == {item.version: item.percent for item in other}


def in_words(routes: Sequence[Route]) -> str:
    """Such as: version 4 with 10% and version 3 with 90%."""
    return " and ".join(f"version {item.version} with {item.percent}%" for item in routes)
