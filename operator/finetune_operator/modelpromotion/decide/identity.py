"""Whether the registry still has the model and the versions that the status is about.

A registry has no identity of its own. The same spec points to another registry when the chart's URI, the host in a Secret or
the database behind an address changes. The versions of that registry may have the same numbers, but did not pass the gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import (
    MAX_VERSION_RECORDS,
    ModelPromotionStatus,
    Move,
    RegistryIdentity,
    VersionRecord,
)
from finetune_operator.modelpromotion.decide.approvers import expire_approvals
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.drift import SOMEBODY
from finetune_operator.modelpromotion.decide.move import record
from finetune_operator.modelpromotion.decide.preconditions import suspend
from finetune_operator.modelpromotion.version_records import has_decision
from finetune_operator.policy.result import Continue, Outcome, Stop


def check_identity(draft: Draft) -> Outcome:
    """End the pass if the registry has another model, or another version under a recorded number.

    The user then decides: if the spec changes after the status has reported the difference, and the changed spec has
    `onDrift: Adopt` and no `suspend`, the promotion starts over like a new one. An Adopt from before the report concerns drift, so it
    does not count until the spec changes.
    """
    difference = find_difference(draft)
    if difference is None:
        draft.set(
            ConditionType.REGISTRY_READY, True, ConditionReason.REGISTRY_READY, "the model registry answers"
        )
        return Continue
    adopts = draft.spec.on_drift == "Adopt"
    if adopts and not draft.spec.suspend and _is_answered(draft):
        _start_over(draft, difference)
        return Continue
    answer = "Warn, and then back to Adopt" if adopts else "Adopt"
    message = (
        f"{difference}: the spec points to another registry, or the database was restored; the operator writes nothing until you undo "
        f"the change, or set spec.onDrift to {answer}, which starts from the current version of the alias"
    )
    draft.set(ConditionType.REGISTRY_READY, False, ConditionReason.REGISTRY_CHANGED, message)
    draft.stop(ConditionReason.REGISTRY_CHANGED, message)
    # The pass ends before the policy `suspend`, which would report whether the promotion is suspended.
    suspend(draft)
    return Stop


def _is_answered(draft: Draft) -> bool:
    """Whether the spec changed after the status reported that the registry changed."""
    condition = draft.condition(ConditionType.REGISTRY_READY)
    return (
        condition is not None
        and condition.reason == ConditionReason.REGISTRY_CHANGED
        and (condition.observed_generation or 0) < draft.generation
    )


def find_difference(draft: Draft) -> str | None:
    """Describe how the model and the versions in the registry differ from the status; None if they do not.

    An unknown value is not a difference, for example the creation time of a model that does not exist.
    """
    recorded, model = draft.status.registry, draft.observed.model
    if recorded is None or model is None:
        return None
    if _differ(recorded.model_creation_time, model.created):
        return (
            f"registered model {model.name} was created at {_format_time(model.created)}, but status.registry records a model created at "
            f"{_format_time(recorded.model_creation_time)}"
        )
    for identity in recorded.versions:
        version = draft.observed.versions.get(identity.version)
        if version is None:
            continue
        if _differ(identity.creation_time, version.created) or _differ(identity.run_id, version.run_id):
            return (
                f"version {version.version} of {model.name} was {_describe_origin(version.created, version.run_id)}, but status.registry "
                f"records one {_describe_origin(identity.creation_time, identity.run_id)}"
            )
    return None


def record_identity(draft: Draft) -> None:
    """Record the identity of the model, and of each version that the status names. A recorded identity is never overwritten.

    NB: a version with a decision keeps its identity too: a version that had the alias can get it back without approval and soak (see
    `promote.revert`), and the same number of another registry must not.
    """
    model = draft.observed.model
    if model is None or not draft.holds(ConditionType.REGISTRY_READY):
        return
    before, status_versions = draft.status.registry or RegistryIdentity(), recorded_versions(draft.status)
    records = {item.version: item for item in before.versions}
    for version in status_versions | records.keys():
        registered, earlier = draft.observed.versions.get(version), records.get(version)
        if registered and (earlier is None or not _is_identified(earlier)):
            identity = {"creation_time": registered.created, "run_id": registered.run_id}
            records[version] = (earlier or VersionRecord(version=version)).model_copy(update=identity)
    draft.update(
        registry=RegistryIdentity(
            model_creation_time=before.model_creation_time or model.created,
            has_decisions=True,
            versions=_keep(records, status_versions),
        )
    )


def _is_identified(identity: VersionRecord) -> bool:
    return identity.creation_time is not None or identity.run_id is not None


def _keep(records: dict[str, VersionRecord], status_versions: set[str]) -> list[VersionRecord]:
    """The records to keep: those of versions that the status names or has decided about, the latter at most up to the limit.

    NB: which decisions are dropped is up to the numbers that the registry gives to versions, not to a clock.
    """
    in_status = sorted(status_versions & records.keys(), key=int, reverse=True)
    decided = [item for item in records if item not in status_versions and has_decision(records[item])]
    versions = [*in_status, *sorted(decided, key=int, reverse=True)][:MAX_VERSION_RECORDS]
    return [records[version] for version in sorted(versions, key=int)]


def recorded_versions(status: ModelPromotionStatus) -> set[str]:
    """The versions that a status names. The alias may be moved to any of them."""
    return set(_iterate_versions(status))


def _iterate_versions(status: ModelPromotionStatus) -> Iterator[str]:
    move, withheld, rollback = status.move, status.withheld, status.rollback
    versions = [status.promoted, status.previous, status.candidate]
    versions += [move.from_version, move.to_version] if move else []
    versions += [withheld.version, withheld.back] if withheld else []
    versions += [rollback.version] if rollback else []
    # A result of a gate's Job counts as long as it is in the status.
    versions += [result.version for result in status.gate_results]
    versions += [status.lost]
    yield from (version for version in versions if version is not None)


def _start_over(draft: Draft, difference: str) -> None:
    """Reset the status to the status of a new promotion."""
    lasting_types = (ConditionType.ACCEPTED, ConditionType.REGISTRY_READY, ConditionType.SUSPENDED)
    message = f"{difference}: spec.onDrift is Adopt, so the promotion starts over from the current version of the alias"
    draft.status = ModelPromotionStatus(
        model=draft.status.model,
        conditions=[item for item in draft.status.conditions if item.type in lasting_types],
    )
    draft.set(ConditionType.REGISTRY_READY, True, ConditionReason.REGISTRY_READY, message)
    draft.watch_from_now()
    expire_approvals(draft)
    if draft.holder is not None:
        adopted = Move(
            to_version=draft.holder, reason="Adopted", message=message, by=SOMEBODY, time=draft.now
        )
        record(draft, adopted)


def _differ(expected: object, actual: object) -> bool:
    return expected is not None and actual is not None and expected != actual


def _describe_origin(created: datetime | None, run_id: str | None) -> str:
    return f"created at {_format_time(created)} {f'by run {run_id}' if run_id else 'without a run'}"


def _format_time(time: datetime | None) -> str:
    """A time with milliseconds. NB: two models or versions may be created in the same second."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z") if time else "an unknown time"
