"""The endpoint cannot serve a version: restore the saved routes, and withdraw the alias if the version is the cause."""

from __future__ import annotations

from typing import Literal

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import EndpointFailure
from finetune_operator.modelpromotion.decide import alias_history, canary, endpoint_change
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import (
    are_same,
    describe_routes,
    has_failed,
    name_of,
    routes_of,
    update_status,
)
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint

# The rest of the message must fit into the status too.
_MAX_CAUSE_CHARS = 3500
_CONDITION_REASONS = {
    "EndpointFailed": ConditionReason.ENDPOINT_FAILED,
    "CanaryFailed": ConditionReason.CANARY_FAILED,
}


def fail(
    draft: Draft,
    endpoint: Endpoint,
    version: str,
    reason: Literal["EndpointFailed", "CanaryFailed"],
    why: str,
) -> None:
    """Record the failure of a version, restore the routes, and withdraw the alias if the version has it and is the cause."""
    saved = canary.serving_status(draft).saved or []
    if saved:
        consequence = f"the endpoint is restored to {describe_routes(saved)}"
    elif endpoint.served:
        consequence = "the endpoint stays as it is"
    else:
        consequence = "there are no routes to restore"
    cause = f"endpoint {name_of(draft)} cannot serve version {version} as specified: {why}"[:_MAX_CAUSE_CHARS]
    alias, promoted = draft.spec.alias, draft.status.promoted
    fallback = alias_history.find_fallback(draft, version, saved)
    if promoted != version:
        # The version was on trial, and does not have the alias.
        stays = f"stays at version {promoted}" if promoted else "is not set"
        message = f"{cause}; {consequence}, and alias {alias} {stays}"
        draft.withhold(version, None, message)
    elif fallback is not None:
        when = "" if draft.holder == version else f" after the drift from version {version} is repaired"
        message = f"{cause}; {consequence}, and alias {alias} moves to version {fallback}{when}"
        draft.withhold(version, fallback, message)
    elif alias_history.was_first(draft, version, saved):
        message = f"{cause}; {consequence}, and alias {alias}, which no version had before, is removed"
        draft.withhold(version, None, message)
    else:
        message = (
            f"{cause}; {consequence}: correct spec.serving or point the alias at another version; the operator does not retry until the "
            "spec changes"
        )
    failure = EndpointFailure(
        version=version, generation=draft.promotion.generation, reason=reason, message=message
    )
    update_status(draft, failure=failure, change=None, canary_complete=None, **canary.NO_STEP)
    go_back(draft, endpoint)


def go_back(draft: Draft, endpoint: Endpoint) -> None:
    """After a failure, restore the saved routes; then do nothing until the spec or the alias changes.

    The request is repeated until the endpoint accepts it.
    """
    status = canary.serving_status(draft)
    failure, saved = status.failure, status.saved or []
    if failure is None:
        return
    message = failure.message
    if endpoint.updating:
        draft.requeue_after(draft.settings.poll_seconds)
    elif saved and endpoint.exists and not are_same(routes_of(endpoint.served), saved):
        if has_failed(draft, endpoint, saved):
            message = f"{message}; the endpoint cannot be restored either: {endpoint.message}"
        else:
            endpoint_change.request(draft, endpoint, saved)
    else:
        # The routes are restored, or there are none to restore.
        update_status(draft, change=None)
    # NB: a first pass only records the change in the status; the next one sends the request.
    sends_request = any(isinstance(action, ConfigureEndpoint) for action in draft.actions)
    # If a request is sent again that the endpoint refused, the condition keeps the refusal.
    if not (sends_request and endpoint_change.was_refused(draft)):
        draft.set(ConditionType.SERVED, False, _CONDITION_REASONS[failure.reason], message)
