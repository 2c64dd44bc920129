"""The serving endpoint follows the alias: create, update, repair, canary and rollback."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import Route
from finetune_operator.modelpromotion.decide import alias_history, canary, endpoint_change
from finetune_operator.modelpromotion.decide import endpoint as endpoints
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.endpoint_failure import fail, go_back
from finetune_operator.modelpromotion.decide.endpoint_logging import ensure_logging, stop_logging
from finetune_operator.serving.model import Endpoint


def serve(draft: Draft) -> None:
    """Bring the endpoint one step closer to serving the version that has the alias, or the one on trial."""
    spec, version = draft.serving, draft.trial or draft.status.promoted
    if spec is None:
        return
    status = canary.serving_status(draft)
    # After a failure, the alias may have been removed, and the routes must still be restored; so they must after a trial that ended.
    if version is None and not status.failure and not status.saved:
        _report_no_version(draft)
        return
    endpoint = endpoints.record_endpoint(draft, spec)
    if endpoint is None:
        return
    if version is not None:
        _begin(draft, endpoint, version)
    if canary.serving_status(draft).failure:
        go_back(draft, endpoint)
    elif version is None:
        _end_trial(draft, endpoint)
    else:
        _advance(draft, endpoint, version)
    stop_logging(draft, endpoint)


def _report_no_version(draft: Draft) -> None:
    message = f"{draft.spec.alias} does not point to a version yet: the endpoint has nothing to serve"
    draft.set(ConditionType.SERVED, False, ConditionReason.WAITING_FOR_VERSION, message)


def _end_trial(draft: Draft, endpoint: Endpoint) -> None:
    """After the trial of a version that does not get the alias, which no version has, restore the routes from before the trial."""
    # NB: without a version in the status, the same candidate starts its canary again.
    endpoints.update_status(draft, version=None, canary_complete=None, **canary.NO_STEP)
    saved = canary.serving_status(draft).saved or []
    if not saved or not endpoint.exists:
        endpoints.update_status(draft, saved=None, change=None)
        _report_no_version(draft)
    elif endpoint.updating:
        endpoint_change.wait(draft, endpoint, saved)
    elif endpoints.are_same(endpoints.routes_of(endpoint.served), saved):
        endpoint_change.complete(draft, endpoint)
        endpoints.update_status(draft, saved=None)
        _report_no_version(draft)
    elif endpoints.has_failed(draft, endpoint, saved):
        message = (
            f"endpoint {endpoints.name_of(draft)} cannot be restored to {endpoints.describe_routes(saved)} after a canary that ended: "
            f"{endpoint.message}"
        )
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_FAILED, message)
        draft.requeue_after(draft.settings.poll_seconds)
    else:
        endpoint_change.request(draft, endpoint, saved)


def hold(draft: Draft) -> None:
    """While the alias is being moved or has drifted, take no further step, but roll back a failed rollout.

    NB: a failed rollout does not wait for the end of the move or drift, which may take long: the registry may reject the move, or the drift
    may wait for a decision.
    """
    spec = draft.serving
    endpoint = endpoints.record_endpoint(draft, spec) if spec else None
    status = canary.serving_status(draft)
    # Either the version that has the alias, or one on trial.
    version = status.version if status.step else draft.status.promoted
    if endpoint is None:
        return
    failed = ""
    if not status.failure and version is not None and status.version == version:
        failed = canary.judge_step(draft, version).failed
    if status.failure:
        go_back(draft, endpoint)
    elif failed:
        fail(draft, endpoint, version or "", "CanaryFailed", f"a canary gate failed: {failed}")
    else:
        _report_hold(draft)
    stop_logging(draft, endpoint)


def _report_hold(draft: Draft) -> None:
    """Report why the endpoint does not follow the alias at the moment. Outside a canary, Served stays unchanged while the alias moves."""
    alias, promoted, holder = draft.spec.alias, draft.status.promoted, draft.holder
    step = canary.describe_step(draft)
    if step:
        draft.requeue_after(draft.settings.poll_seconds)
    has_drifted = promoted != holder and draft.status.move is None
    if has_drifted:
        stays = (
            f"{step}; the step does not change"
            if step
            else f"endpoint {endpoints.name_of(draft)} stays as it is"
        )
        where = f"at version {promoted} again" if promoted else "removed"
        reason = ConditionReason.ALIAS_MOVED if holder else ConditionReason.ALIAS_REMOVED
        draft.set(
            ConditionType.SERVED,
            None,
            reason,
            f"{stays} until alias {alias} is {where}, or the drift is accepted",
        )
    elif step:
        message = f"{step}; the next step waits while alias {alias} is moved"
        draft.set(ConditionType.SERVED, False, ConditionReason.CANARY, message)


def _begin(draft: Draft, endpoint: Endpoint, version: str) -> None:
    """Start a rollout when a new version has the alias, or when the spec changed after a failure."""
    status = canary.serving_status(draft)
    failure = status.failure
    is_new_version = status.version != version
    if draft.trial is None and not is_new_version and status.canary_complete:
        # The alias has moved to the version after its canary: the rollout is complete.
        endpoints.update_status(draft, saved=None, canary_complete=None)
    may_retry = failure is not None and (
        failure.version != version or failure.generation != draft.promotion.generation
    )
    if not (is_new_version or may_retry):
        return
    # NB: an interrupted rollout was never in place, so the routes that were saved before it stay the ones to restore. The same holds for a
    # version whose canary is complete and that does not get the alias: the version that has the alias returns without a canary.
    saved = endpoints.routes_of(endpoint.served) if status.saved is None else status.saved
    # A current change that restores the routes after a failure stays: they serve the version that gets the alias back.
    is_restoring = failure is not None and endpoint.updating and is_new_version
    skips_canary = draft.trial is None and alias_history.skips_canary(draft, version)
    has_canary = not skips_canary and canary.is_possible(draft, version, saved)
    endpoints.update_status(
        draft,
        version=version,
        saved=saved,
        canary_complete=None,
        **canary.step_fields(1 if has_canary else None),
        change=status.change if is_restoring else None,
        failure=None,
    )


def _advance(draft: Draft, endpoint: Endpoint, version: str) -> None:
    """Take the next action of a rollout: wait, request a change, take the next step of the canary, or fail."""
    verdicts = canary.judge_step(draft, version)
    if verdicts.failed:
        fail(draft, endpoint, version, "CanaryFailed", f"a canary gate failed: {verdicts.failed}")
        return
    routes = _current_routes(draft, version)
    if endpoint.updating:
        endpoint_change.wait(draft, endpoint, routes)
    elif endpoints.has_failed(draft, endpoint, routes):
        fail(draft, endpoint, version, "EndpointFailed", f"its deployment failed: {endpoint.message}")
    elif not endpoints.is_in_place(draft, endpoint, routes):
        endpoint_change.request(draft, endpoint, routes)
    else:
        endpoint_change.complete(draft, endpoint)
        # NB: each of these two reports why it is false. The second may request a change, which must wait until the endpoint answers.
        if not endpoint_change.is_answering(draft, endpoint) or not ensure_logging(draft, endpoint):
            return
        if not canary.serving_status(draft).step:
            _conclude(draft, routes)
        elif canary.take_next_step(draft, verdicts):
            endpoint_change.request(draft, endpoint, _current_routes(draft, version))


def _current_routes(draft: Draft, version: str) -> list[Route]:
    """The routes of the current step of the canary; without a step, all traffic goes to the version."""
    return canary.canary_routes(draft, version) or [Route(version=version, percent=100)]


def _conclude(draft: Draft, routes: Sequence[Route]) -> None:
    """Report that the rollout is complete."""
    if draft.trial is None:
        endpoints.update_status(draft, saved=None, canary_complete=None, **canary.NO_STEP)
    else:
        # The next pass moves the alias. Until it has moved, the version may still lose its trial.
        endpoints.update_status(draft, canary_complete=True, **canary.NO_STEP)
        draft.requeue_after(0)
    message = f"endpoint {endpoints.name_of(draft)} serves {endpoints.describe_routes(routes)}"
    draft.set(ConditionType.SERVED, True, ConditionReason.ENDPOINT_READY, message)
