"""Registration: the trainer creates the version, and only the operator writes its aliases.

Aliases that a ModelPromotion manages are left to it: two writers would overwrite each other's moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import Register
from finetune_crds.status import ModelStatus
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.finetunejob.model import SetAlias
from finetune_operator.policy.outcome import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion


def register(draft: Draft) -> Outcome:
    """Point the aliases at the version of this run; the pass ends while they do not."""
    wanted = draft.spec.register_
    if wanted is None or draft.holds(ConditionType.REGISTERED):
        return Continue
    seen = draft.observed.mlflow
    if seen is None or seen.problem:
        reason, why = ConditionReason.REGISTERING, "MLflow has not been asked yet"
        if seen and seen.problem:
            reason, why = seen.problem.reason, seen.problem.message
        draft.set(ConditionType.REGISTERED, False, reason, f"registration waits for MLflow: {why}")
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    if seen.version is None:
        return _wait_for_version(draft, wanted)
    _copy(draft, seen.version)
    owned = draft.observed.owned
    missing = [alias for alias in wanted.aliases if alias not in seen.version.aliases and alias not in owned]
    if missing:
        draft.actions += [SetAlias(wanted.model, alias, seen.version.version) for alias in missing]
        draft.set(
            ConditionType.REGISTERED, False, ConditionReason.REGISTERING, f"setting {', '.join(missing)}"
        )
        return Stop
    draft.set(
        ConditionType.REGISTERED, True, ConditionReason.REGISTERED, _registered(wanted, seen.version, owned)
    )
    return Continue


def _registered(wanted: Register, version: RegisteredVersion, owned: Mapping[str, str]) -> str:
    own = [alias for alias in wanted.aliases if alias not in owned]
    left = [
        f"alias {alias} is left to ModelPromotion {owned[alias]}"
        for alias in wanted.aliases
        if alias in owned
    ]
    aliases = f", now {', '.join(own)}" if own else ""
    return "; ".join([f"{wanted.model} version {version.version}{aliases}", *left])


def _wait_for_version(draft: Draft, wanted: Register) -> Outcome:
    trained = draft.condition(ConditionType.TRAINED)
    waited = (draft.now - trained.last_transition_time).total_seconds() if trained else 0.0
    if waited < draft.settings.registration_patience_seconds:
        draft.set(
            ConditionType.REGISTERED,
            False,
            ConditionReason.REGISTERING,
            f"waiting for a version of {wanted.model}",
        )
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    run = draft.status.run_id
    message = (
        f"training ended without a version of {wanted.model} from run {run}: have the script register one from "
        "MLFLOW_RUN_ID, or remove spec.register"
    )
    draft.set(ConditionType.REGISTERED, False, ConditionReason.REGISTRATION_FAILED, message)
    draft.fail(ConditionReason.REGISTRATION_FAILED, message)
    return Stop


def _copy(draft: Draft, version: RegisteredVersion) -> None:
    before = draft.status.model or ModelStatus()
    draft.update(
        model=before.model_copy(
            update={
                "name": version.name,
                "version": version.version,
                "uri": f"models:/{version.name}/{version.version}",
                "summary": f"{version.name}/{version.version}",
                "aliases": sorted(version.aliases) or None,
            }
        )
    )
