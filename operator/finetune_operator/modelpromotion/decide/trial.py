"""The trial of a version: its canary before it gets the alias, with spec.serving.aliasMoves AfterCanary."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason
from finetune_operator.modelpromotion.decide import canary, endpoint
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.versions import main_version
from finetune_operator.policy.result import Continue, Outcome, Stop


def await_canary(draft: Draft) -> Outcome:
    """Let the endpoint follow the candidate, which meets every other requirement, until its canary is complete."""
    version = draft.status.candidate or ""
    if not _has_canary(draft):
        return Continue
    status, name = canary.serving_status(draft), endpoint.name_of(draft)
    if status.endpoint == name and status.version == version:
        # `serving` forgets the saved routes when a rollout outside a trial is complete.
        is_complete = status.failure is None and (status.saved is None or status.canary_complete is True)
        return Continue if is_complete else _try(draft, version)
    observed = draft.observed.endpoint
    if observed is None or observed.problem or endpoint.find_foreign_models(draft, observed):
        # Which versions the endpoint serves is unknown, or it serves another model. `serving` reports that.
        return _try(draft, version)
    base = main_version(status.saved or endpoint.routes_of(observed.served))
    if base in (None, version):
        # The endpoint serves no other version yet, so there is no canary.
        return Continue
    promoted = draft.status.promoted
    has_failed = status.failure is not None and status.failure.version == promoted
    if promoted not in (None, base) and not has_failed:
        message = (
            f"version {version} meets every requirement; its canary waits until endpoint {name} serves version {promoted}, which has "
            f"alias {draft.spec.alias}"
        )
        draft.stop(ConditionReason.CANARY, message)
        return Stop
    return _try(draft, version)


def has_begun(draft: Draft, version: str) -> bool:
    """Whether the canary of the version has begun before its move, and has not failed."""
    status = canary.serving_status(draft)
    return (
        _has_canary(draft)
        and (status.endpoint, status.version) == (endpoint.name_of(draft), version)
        and status.saved is not None
        and status.failure is None
    )


def _try(draft: Draft, version: str) -> Outcome:
    """Let the endpoint follow the version in this pass. The alias stays."""
    draft.trial = version
    message = (
        f"version {version} meets every requirement; alias {draft.spec.alias} moves to it after the canary at endpoint "
        f"{endpoint.name_of(draft)}"
    )
    draft.stop(ConditionReason.CANARY, message)
    return Stop


def _has_canary(draft: Draft) -> bool:
    spec = draft.serving
    return spec is not None and spec.canary is not None and spec.alias_moves == "AfterCanary"
