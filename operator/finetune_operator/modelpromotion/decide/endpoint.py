"""Compare the endpoint as it was read with the spec and with the change that the status records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import Route, Serving
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.registry.base import is_same_name
from finetune_operator.serving.model import Endpoint, ServedVersion


def name_of(draft: Draft) -> str:
    """The name of the endpoint; empty when the spec has none."""
    return draft.serving.endpoint if draft.serving else ""


def update_status(draft: Draft, **fields: Any) -> None:
    """Set fields of status.serving."""
    draft.update(serving=canary.serving_status(draft).model_copy(update=fields))


def record_endpoint(draft: Draft, spec: Serving) -> Endpoint | None:
    """Copy the endpoint's state into the status, and return the endpoint; None if it was not read or serves another model."""
    endpoint = draft.observed.endpoint
    if endpoint is None:
        return None
    if endpoint.problem:
        draft.set(ConditionType.SERVED, None, endpoint.problem.reason, endpoint.problem.message)
        draft.requeue_after(draft.settings.poll_seconds)
        return None
    if canary.serving_status(draft).endpoint not in (None, spec.endpoint):
        # The spec named another endpoint before, and the status is still about that one.
        draft.update(serving=None)
    update_status(
        draft,
        endpoint=spec.endpoint,
        url=endpoint.url,
        state=_state(endpoint),
        routes=routes_of(endpoint.served) or None,
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


def _is_foreign(draft: Draft, spec: Serving, endpoint: Endpoint) -> bool:
    """Whether the endpoint serves another model; if so, report it. NB: the spec may name such an endpoint by mistake, so it is never changed."""
    foreign_models = find_foreign_models(draft, endpoint)
    if not foreign_models:
        return False
    what = " and ".join(
        sorted(f"the model {name}" if name else "another provider's model" for name in foreign_models)
    )
    message = (
        f"endpoint {spec.endpoint} serves {what}, so the operator does not change the endpoint: set spec.serving.endpoint to another "
        "name, or delete the endpoint"
    )
    draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_FAILED, message)
    return True


def find_foreign_models(draft: Draft, endpoint: Endpoint) -> set[str]:
    """Names of the other models that the endpoint serves; an empty name is another provider's model."""
    served = {item.model for item in (*endpoint.served, *endpoint.pending)}
    return {name for name in served if not _is_same_model(draft, name)}


def _is_same_model(draft: Draft, name: str) -> bool:
    model = draft.spec.model
    _, registry = draft.settings.servers(draft.spec.tracking)
    return is_same_name(registry, name, model)


def is_ours(draft: Draft, endpoint: Endpoint, routes: Sequence[Route]) -> bool:
    """Whether the endpoint's current or last change is the operator's own: to these routes, and recorded in the status.

    NB: `change.revision` is the endpoint's revision before the change was sent, so another revision shows that the change arrived. A new
    endpoint may have no revision while its first update is pending.
    """
    change = canary.serving_status(draft).change
    if (
        change is None
        or not are_same(change.routes, routes)
        or change.settings != configuration_digest(draft)
    ):
        return False
    pending = routes_of(endpoint.pending)
    if pending and not are_same(pending, routes):
        return False
    return endpoint.revision != change.revision or (endpoint.revision is None and bool(pending))


def has_failed(draft: Draft, endpoint: Endpoint, routes: Sequence[Route]) -> bool:
    """Whether the change to these routes failed."""
    return endpoint.failed and not endpoint.updating and is_ours(draft, endpoint, routes)


def is_in_place(draft: Draft, endpoint: Endpoint, routes: Sequence[Route]) -> bool:
    """Whether the endpoint has these routes and the settings of the spec. The caller has excluded a current or failed change."""
    if not endpoint.exists or not are_same(routes_of(endpoint.served), routes):
        return False
    status = canary.serving_status(draft)
    # Without a revision, or a record of what was requested, only the endpoint's settings can be compared.
    if endpoint.revision is None or (status.settings is None and status.change is None):
        return endpoint.matches_spec
    if is_ours(draft, endpoint, routes):
        # The change was applied, even if the endpoint reports its settings in another form.
        return True
    # No change is under way: `endpoint_change.complete` recorded the settings and the revision of the last change.
    is_spec_unchanged = status.settings == configuration_digest(draft)
    is_endpoint_unchanged = endpoint.revision == status.revision
    return is_spec_unchanged and (endpoint.matches_spec or is_endpoint_unchanged)


def configuration_digest(draft: Draft) -> str:
    """Digest of the endpoint's spec except for the versions that it serves."""
    backend = draft.promotion.backend
    return digest(backend.configuration) if backend else ""


def routes_of(served: Sequence[ServedVersion]) -> list[Route]:
    """The routes of these versions, largest share first."""
    shares: dict[str, int] = {}
    for item in served:
        shares[item.version] = shares.get(item.version, 0) + item.percent
    routes = [Route(version=version, percent=percent) for version, percent in shares.items()]
    return sorted(routes, key=lambda route: -route.percent)


def are_same(left_routes: Sequence[Route], right_routes: Sequence[Route]) -> bool:
    """Whether both give each version the same share."""
    return {item.version: item.percent for item in left_routes} == {
        item.version: item.percent for item in right_routes
    }


def describe_routes(routes: Sequence[Route]) -> str:
    """The routes as text, for example: version 4 with 10% and version 3 with 90%."""
    return " and ".join(f"version {item.version} with {item.percent}%" for item in routes)
