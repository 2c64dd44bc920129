"""A version that its endpoint cannot serve: restore the saved routes, and withdraw the alias where that can help."""

from __future__ import annotations

from typing import Literal

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import EndpointFailure
from finetune_operator.modelpromotion.decide import alias_history, canary, endpoint_change
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import (
    has_failed,
    in_force,
    in_words,
    name_of,
    note,
    same,
)
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint

_FAILURES = {"EndpointFailed": ConditionReason.ENDPOINT_FAILED, "CanaryFailed": ConditionReason.CANARY_FAILED}


def fail(
    draft: Draft, endpoint: Endpoint, reason: Literal["EndpointFailed", "CanaryFailed"], why: str
) -> None:
    """Record the failure, restore the routes, and withdraw the alias unless the version is not to blame."""
    known, version = canary.known_of(draft), draft.status.promoted or ""
    saved = known.saved or []
    stays = "it stays as it is" if endpoint.served else "there is nothing to go back to"
    back = f"it goes back to {in_words(saved)}" if saved else stays
    failed = f"endpoint {name_of(draft)} cannot serve version {version} as asked: {why}"[:3500]
    fallback = alias_history.fallback(draft, version, saved)
    if fallback is not None:
        once = "" if draft.holder == version else f" once it is at version {version} again"
        message = f"{failed}; {back}, and {draft.spec.alias} to version {fallback}{once}"
        draft.withdraw(fallback, message)
    elif alias_history.was_first(draft, version, saved):
        message = f"{failed}; {back}, and alias {draft.spec.alias}, which no version had before, is removed"
        draft.withdraw(None, message)
    else:
        message = (
            f"{failed}; {back}: correct spec.serving.databricks or point the alias at another version; nothing is tried "
            "again until the spec changes"
        )
    failure = EndpointFailure(
        version=version, generation=draft.promotion.generation, reason=reason, message=message
    )
    note(draft, failure=failure, change=None, **canary.NO_STEP)
    go_back(draft, endpoint)


def go_back(draft: Draft, endpoint: Endpoint) -> None:
    """After a failure restore the saved routes, once; then do nothing until the spec or the alias changes."""
    known = canary.known_of(draft)
    failure, saved = known.failure, known.saved or []
    if failure is None:
        return
    message = failure.message
    if endpoint.updating:
        draft.requeue_after(draft.settings.poll_seconds)
    elif saved and endpoint.exists and not same(in_force(endpoint.served), saved):
        if has_failed(draft, endpoint, saved):
            message = f"{message}; going back failed too: {endpoint.message}"
        else:
            endpoint_change.request(draft, endpoint, saved)
    else:
        note(draft, change=None)
    requested = any(isinstance(action, ConfigureEndpoint) for action in draft.actions)
    if not (requested and endpoint_change.was_refused(draft)):
        draft.set(ConditionType.SERVED, False, _FAILURES[failure.reason], message)
