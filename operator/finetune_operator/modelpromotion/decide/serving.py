"""The serving endpoint follows the alias: create, change, repair, canary, and back again.

What Databricks is asked for is written into the status first; the pass that finds it there asks. So a change that
fails is known as ours, what the endpoint goes back to is known before it is touched, and a restart forgets nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.serving import DatabricksServing, EndpointChange, EndpointFailure, Route
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.decide import canary, past
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.terms import digest
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, LogRequests, ServedVersion, workload
from finetune_operator.settings import UNITY_CATALOG

_FAILURES = {"EndpointFailed": ConditionReason.ENDPOINT_FAILED, "CanaryFailed": ConditionReason.CANARY_FAILED}
# What `undone` leaves in the condition when Databricks did not take a change on.
_REFUSED = (
    ConditionReason.ENDPOINT_BUSY,
    ConditionReason.DATABRICKS_ERROR,
    ConditionReason.DATABRICKS_FORBIDDEN,
    ConditionReason.DATABRICKS_NOT_CONFIGURED,
    ConditionReason.DATABRICKS_UNREACHABLE,
)


def serve(draft: Draft) -> None:
    """Bring the endpoint one step nearer to serving the version that has the alias."""
    spec, version = _spec(draft), draft.status.promoted
    if spec is None:
        return
    if version is None and not canary.known_of(draft).failure:
        message = f"{draft.spec.alias} points at no version yet: there is nothing to serve"
        draft.set(ConditionType.SERVED, False, ConditionReason.WAITING_FOR_VERSION, message)
        return
    endpoint = _look(draft, spec)
    if endpoint is None:
        return
    if version is not None:
        _begin(draft, endpoint, version)
    if version is None or canary.known_of(draft).failure:
        _go_back(draft, endpoint)
    else:
        _bring(draft, spec, endpoint, version)


def hold(draft: Draft) -> None:
    """While the alias is on its way, or where it should not be: nothing goes forward, but what fails goes back.

    NB: that may be for long, where the alias may not be written, or somebody else moved it and nobody decides.
    """
    spec = _spec(draft)
    endpoint = _look(draft, spec) if spec else None
    known, version = canary.known_of(draft), draft.status.promoted
    if endpoint is None:
        return
    failed = ""
    if not known.failure and version is not None and known.version == version:
        failed = canary.judge_step(draft, version).failed
    if known.failure:
        _go_back(draft, endpoint)
    elif failed:
        _fail(draft, endpoint, "CanaryFailed", f"a gate of the canary failed: {failed}")
    else:
        _say_held(draft)


def _say_held(draft: Draft) -> None:
    alias, promoted, holder = draft.spec.alias, draft.status.promoted, draft.holder
    so_far = canary.so_far(draft)
    if so_far:
        draft.requeue_after(draft.settings.poll_seconds)
    if promoted != holder and draft.status.move is None:
        stays = (
            f"{so_far}, and no further step is taken" if so_far else f"endpoint {_name(draft)} stays as it is"
        )
        where = f"at version {promoted}" if promoted else "removed"
        reason = ConditionReason.ALIAS_MOVED if holder else ConditionReason.ALIAS_REMOVED
        draft.set(ConditionType.SERVED, None, reason, f"{stays} until {alias} is {where}, as it should be")
    elif so_far:
        message = f"{so_far}; no further step is taken while {alias} is being moved"
        draft.set(ConditionType.SERVED, False, ConditionReason.CANARY, message)


def _look(draft: Draft, spec: DatabricksServing) -> Endpoint | None:
    """The endpoint, if it is known and ours."""
    endpoint = draft.observed.endpoint
    if endpoint is None:
        return None
    if endpoint.problem:
        _cannot_ask(draft, endpoint.problem)
        return None
    _describe(draft, spec, endpoint)
    return None if _is_foreign(draft, spec, endpoint) else endpoint


def _bring(draft: Draft, spec: DatabricksServing, endpoint: Endpoint, version: str) -> None:
    verdicts = canary.judge_step(draft, version)
    if verdicts.failed:
        _fail(draft, endpoint, "CanaryFailed", f"a gate of the canary failed: {verdicts.failed}")
        return
    wanted = canary.routes(draft, version) or _routes(draft, spec, version)
    if endpoint.updating:
        _wait(draft, endpoint, wanted)
    elif _has_failed(draft, endpoint, wanted):
        _fail(draft, endpoint, "EndpointFailed", f"Databricks could not deploy it: {endpoint.message}")
    elif not _is_in_place(draft, endpoint, wanted):
        _ask(draft, endpoint, wanted)
    else:
        _settle(draft, endpoint)
        if not _answers(draft, endpoint) or not _logs(draft, spec, endpoint):
            return
        if not canary.known_of(draft).step:
            _conclude(draft, spec, wanted)
        elif canary.go_forward(draft, verdicts):
            _ask(draft, endpoint, canary.routes(draft, version) or _routes(draft, spec, version))


def _spec(draft: Draft) -> DatabricksServing | None:
    return draft.spec.serving.databricks if draft.spec.serving else None


def _name(draft: Draft) -> str:
    spec = _spec(draft)
    return spec.endpoint if spec else ""


def _note(draft: Draft, **fields: Any) -> None:
    draft.update(serving=canary.known_of(draft).model_copy(update=fields))


def _cannot_ask(draft: Draft, problem: Problem) -> None:
    draft.set(ConditionType.SERVED, None, problem.reason, problem.message)
    draft.requeue_after(draft.settings.poll_seconds)


def _describe(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> None:
    if canary.known_of(draft).endpoint not in (None, spec.endpoint):
        # Nothing that is known is about this one.
        draft.update(serving=None)
    state = "Missing"
    if endpoint.exists:
        settled = "Ready" if endpoint.ready else "NotReady"
        state = "Updating" if endpoint.updating else "UpdateFailed" if endpoint.failed else settled
    _note(
        draft,
        endpoint=spec.endpoint,
        url=endpoint.url,
        state=state,
        routes=_in_force(endpoint.served) or None,
    )


def _is_foreign(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> bool:
    """NB: an endpoint of another model is never overwritten: a name in the spec may be a mistake."""
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
    # Unity Catalog takes Main.llm.support and main.LLM.support for one model.
    return name.casefold() == model.casefold() if registry == UNITY_CATALOG else name == model


def _begin(draft: Draft, endpoint: Endpoint, version: str) -> None:
    """Notice that another version is to be served, or that the spec changed after a failure."""
    known = canary.known_of(draft)
    failure = known.failure
    if (
        known.version == version
        and failure
        and failure.version == version
        and failure.generation == draft.promotion.generation
    ):
        return
    if known.version != version or failure:
        # NB: a move that another one cuts short was never in place: what was saved for it still is what to go back to.
        saved = _in_force(endpoint.served) if known.saved is None else known.saved
        stepwise = not past.is_at_once(draft, version) and canary.is_possible(draft, version, saved)
        _note(
            draft,
            version=version,
            saved=saved,
            **canary.step(1 if stepwise else None),
            # A change in progress that restores the routes after a failure also suits the version that gets the alias back.
            change=known.change if failure and endpoint.updating and known.version != version else None,
            failure=None,
        )


def _routes(draft: Draft, spec: DatabricksServing, version: str) -> list[Route]:
    """Who gets what once everything is in place. A version that was left because it is bad gets nothing."""
    previous, share = draft.status.previous, spec.previous_percent
    alone = [Route(version=version, percent=100)]
    if previous is None or not share:
        return alone
    withheld = draft.status.withheld
    if (
        previous == version
        or past.left_a_bad_one(draft, version)
        or draft.observed.lacks(previous)
        or (withheld and withheld.version == previous)
    ):
        return alone
    return [Route(version=version, percent=100 - share), Route(version=previous, percent=share)]


def _wait(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> None:
    if _is_ours(draft, endpoint, wanted):
        _say_updating(draft, wanted)
    else:
        message = f"another change of endpoint {_name(draft)} is under way: waiting for its end"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_BUSY, message)
    draft.requeue_after(draft.settings.poll_seconds)


def _is_ours(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    """Whether the change that Databricks is at, or failed to make, is the one that we asked for."""
    change = canary.known_of(draft).change
    if change is None or not _same(change.routes, wanted) or change.settings != _settings(draft):
        return False
    pending = _in_force(endpoint.pending)
    if pending and not _same(pending, wanted):
        return False
    return endpoint.revision != change.revision or (endpoint.revision is None and bool(pending))


def _has_failed(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    return endpoint.failed and not endpoint.updating and _is_ours(draft, endpoint, wanted)


def _is_in_place(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> bool:
    if not endpoint.exists or not _same(_in_force(endpoint.served), wanted):
        return False
    known, settings = canary.known_of(draft), _settings(draft)
    if endpoint.revision is None or (known.settings is None and known.change is None):
        return endpoint.as_asked
    if _is_ours(draft, endpoint, wanted):
        # Databricks did what it was asked for, even where it words it otherwise.
        return True
    return known.settings == settings and (endpoint.as_asked or endpoint.revision == known.revision)


def _ask(draft: Draft, endpoint: Endpoint, wanted: Sequence[Route]) -> None:
    """Have the endpoint changed: the status first, and once that is written, the endpoint."""
    spec, held = _spec(draft), draft.promotion.status.serving
    if spec is None:
        return
    change = EndpointChange(routes=list(wanted), settings=_settings(draft), revision=endpoint.revision)
    _note(draft, change=change)
    if held is None or held.change != change:
        # A step lasts from when it is in force.
        _note(draft, step_since=None, next_step_at=None)
        if not canary.known_of(draft).failure:
            _say_updating(draft, wanted)
        draft.requeue_after(0)
        return
    if not canary.known_of(draft).failure and not _was_refused(draft):
        _say_updating(draft, wanted)
    served = tuple(ServedVersion(draft.spec.model, item.version, item.percent) for item in wanted)
    draft.actions.append(ConfigureEndpoint(spec, served, create=not endpoint.exists))
    draft.requeue_after(draft.settings.poll_seconds)


def _was_refused(draft: Draft) -> bool:
    """Whether Databricks did not take the change on when it was last asked: said until it does."""
    condition = draft.condition(ConditionType.SERVED)
    return condition is not None and condition.reason in _REFUSED


def _settle(draft: Draft, endpoint: Endpoint) -> None:
    _note(draft, change=None, settings=_settings(draft), revision=endpoint.revision)


def _answers(draft: Draft, endpoint: Endpoint) -> bool:
    if not endpoint.ready:
        message = f"endpoint {_name(draft)} is configured, and does not answer yet"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
        draft.requeue_after(draft.settings.poll_seconds)
    return endpoint.ready


def _logs(draft: Draft, spec: DatabricksServing, endpoint: Endpoint) -> bool:
    if endpoint.inference_table:
        return True
    if not _was_refused(draft):
        message = f"endpoint {spec.endpoint} is being told to log its requests"
        draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)
    draft.actions.append(LogRequests(spec))
    draft.requeue_after(draft.settings.poll_seconds)
    return False


def _conclude(draft: Draft, spec: DatabricksServing, routes: Sequence[Route]) -> None:
    _note(draft, saved=None, **canary.NO_STEP)
    message = f"endpoint {spec.endpoint} serves {in_words(routes)}"
    draft.set(ConditionType.SERVED, True, ConditionReason.ENDPOINT_READY, message)


def _fail(
    draft: Draft, endpoint: Endpoint, reason: Literal["EndpointFailed", "CanaryFailed"], why: str
) -> None:
    """Note what failed, have the endpoint go back, and the alias too where that can help."""
    known, version = canary.known_of(draft), draft.status.promoted or ""
    saved = known.saved or []
    stays = "it stays as it is" if endpoint.served else "there is nothing to go back to"
    back = f"it goes back to {in_words(saved)}" if saved else stays
    said = f"endpoint {_name(draft)} cannot serve version {version} as asked: {why}"[:3500]
    heir = past.heir(draft, version, saved)
    if heir is not None:
        once = "" if draft.holder == version else f" once it is at version {version} again"
        message = f"{said}; {back}, and {draft.spec.alias} to version {heir}{once}"
        draft.withdraw(heir, message)
    elif past.was_first(draft, version, saved):
        message = f"{said}; {back}, and alias {draft.spec.alias}, which no version had before, is removed"
        draft.withdraw(None, message)
    else:
        message = (
            f"{said}; {back}: correct spec.serving.databricks or point the alias at another version; nothing is tried "
            "again until the spec changes"
        )
    failure = EndpointFailure(
        version=version, generation=draft.promotion.generation, reason=reason, message=message
    )
    _note(draft, failure=failure, change=None, **canary.NO_STEP)
    _go_back(draft, endpoint)


def _go_back(draft: Draft, endpoint: Endpoint) -> None:
    """After a failure: the saved routes, once; then nothing until the spec or the alias changes."""
    known = canary.known_of(draft)
    failure, saved = known.failure, known.saved or []
    if failure is None:
        return
    message = failure.message
    if endpoint.updating:
        draft.requeue_after(draft.settings.poll_seconds)
    elif saved and endpoint.exists and not _same(_in_force(endpoint.served), saved):
        if _has_failed(draft, endpoint, saved):
            message = f"{message}; going back failed too: {endpoint.message}"
        else:
            _ask(draft, endpoint, saved)
    else:
        _note(draft, change=None)
    asks = any(isinstance(action, ConfigureEndpoint) for action in draft.actions)
    if not (asks and _was_refused(draft)):
        draft.set(ConditionType.SERVED, False, _FAILURES[failure.reason], message)


def _say_updating(draft: Draft, wanted: Sequence[Route]) -> None:
    message = f"endpoint {_name(draft)} is being changed to serve {in_words(wanted)}"
    draft.set(ConditionType.SERVED, False, ConditionReason.ENDPOINT_UPDATING, message)


def _settings(draft: Draft) -> str:
    """Digest of what the spec says of the endpoint besides who is served."""
    spec = _spec(draft)
    if spec is None:
        return ""
    reserved = spec.provisioned_throughput
    machines = reserved.to_json() if reserved else dataclasses.asdict(workload(spec))
    return digest([machines, dict(spec.environment)])


def _in_force(served: Sequence[ServedVersion]) -> list[Route]:
    """The share of each version, the greatest first."""
    shares: dict[str, int] = {}
    for item in served:
        shares[item.version] = shares.get(item.version, 0) + item.percent
    routes = [Route(version=version, percent=percent) for version, percent in shares.items()]
    return sorted(routes, key=lambda route: -route.percent)


def _same(one: Sequence[Route], other: Sequence[Route]) -> bool:
    return {item.version: item.percent for item in one} == {item.version: item.percent for item in other}


def in_words(routes: Sequence[Route]) -> str:
    """Such as: version 4 with 10% and version 3 with 90%."""
    return " and ".join(f"version {item.version} with {item.percent}%" for item in routes)
