"""A change of the endpoint: recorded in the status by one pass, requested by the next.

Because the status is written first, the operator recognizes its own change if it fails, the routes to restore are known before
the endpoint is touched, and a restart loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import EndpointChange, Route
from finetune_operator.modelpromotion.decide import canary
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint import (
    configuration_digest,
    describe_routes,
    is_ours,
    name_of,
    update_status,
)
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, ServedVersion


def request(draft: Draft, endpoint: Endpoint, routes: Sequence[Route]) -> None:
    """Record the change to these routes in the status or, if the written status already records it, request it."""
    written_status = draft.promotion.status.serving
    change = EndpointChange(
        routes=list(routes), settings=configuration_digest(draft), revision=endpoint.revision
    )
    update_status(draft, change=change)
    if written_status is None or written_status.change != change:
        # The time of a canary step starts when the step is in force.
        update_status(draft, step_start_time=None, next_step_time=None)
        # The failure of an earlier change stays in the condition until the endpoint accepts a request.
        if not canary.serving_status(draft).failure:
            _report_updating(draft, routes)
        draft.requeue_after(0)
        return
    # This pass sends the request, for the first time or again. If the endpoint rejected it before, the condition keeps that rejection:
    # "is being changed" would hide it.
    if not canary.serving_status(draft).failure and not was_refused(draft):
        _report_updating(draft, routes)
    served = tuple(ServedVersion(draft.spec.model, item.version, item.percent) for item in routes)
    draft.actions.append(ConfigureEndpoint(served, create=not endpoint.exists))
    draft.requeue_after(draft.settings.poll_seconds)


def was_refused(draft: Draft) -> bool:
    """Whether the condition Served says that the endpoint rejected the last request, or is busy with another change.

    `failed_action` reports a rejection, and `wait` the change of another client.
    """
    condition, backend = draft.condition(ConditionType.SERVED), draft.promotion.backend
    rejections = (ConditionReason.ENDPOINT_BUSY, *(backend.rejection_reasons if backend else ()))
    return condition is not None and condition.reason in rejections


def wait(draft: Draft, endpoint: Endpoint, routes: Sequence[Route]) -> None:
    """Wait until the current change, the operator's own or another client's, is complete."""
    if is_ours(draft, endpoint, routes):
        _report_updating(draft, routes)
    else:
        message = f"another change of endpoint {name_of(draft)} is in progress: waiting until it is complete"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_BUSY, message)
    draft.requeue_after(draft.settings.poll_seconds)


def complete(draft: Draft, endpoint: Endpoint) -> None:
    """Record that the endpoint has the requested configuration."""
    update_status(draft, change=None, settings=configuration_digest(draft), revision=endpoint.revision)


def is_answering(draft: Draft, endpoint: Endpoint) -> bool:
    """Whether the endpoint answers requests; if it does not, report that."""
    if not endpoint.ready:
        why = f": {endpoint.message}" if endpoint.message else ""
        message = f"endpoint {name_of(draft)} is configured but does not respond yet{why}"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
        draft.requeue_after(draft.settings.poll_seconds)
    return endpoint.ready


def _report_updating(draft: Draft, routes: Sequence[Route]) -> None:
    message = f"endpoint {name_of(draft)} is being changed to serve {describe_routes(routes)}"
    draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
