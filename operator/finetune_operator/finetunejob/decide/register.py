"""Registration: only the operator writes the aliases of the version that the trainer created.

Aliases that a ModelPromotion manages are left to it: two writers would overwrite each other's moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.tracking import Register
from finetune_operator.finetunejob.decision import SetAlias
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion


def register(draft: Draft) -> Outcome:
    """Point the aliases at the version of this run. Until they point at it, each pass ends here."""
    registration = draft.spec.register_
    if registration is None or draft.holds(ConditionType.REGISTERED):
        return Continue
    version = draft.observed.mlflow.version if draft.observed.mlflow else None
    if version is None:
        # Not reached: `await_version` or `evaluate` has ended the pass, and reports the wait.
        return Stop
    promotions = draft.observed.promoted_aliases
    missing = [
        alias for alias in registration.aliases if alias not in version.aliases and alias not in promotions
    ]
    if missing:
        draft.actions += [SetAlias(registration.model, alias, version.version) for alias in missing]
        draft.set(
            ConditionType.REGISTERED, False, ConditionReason.REGISTERING, f"setting {', '.join(missing)}"
        )
        return Stop
    draft.set(
        ConditionType.REGISTERED,
        True,
        ConditionReason.REGISTERED,
        _describe_registration(registration, version, promotions),
    )
    return Continue


def _describe_registration(
    registration: Register, version: RegisteredVersion, promotions: Mapping[str, str]
) -> str:
    """Describe the version and its aliases. `promotions`: the ModelPromotions that manage aliases, by alias."""
    job_aliases = [alias for alias in registration.aliases if alias not in promotions]
    notes = [
        f"ModelPromotion {promotions[alias]} manages alias {alias}"
        for alias in registration.aliases
        if alias in promotions
    ]
    aliases = f", now {', '.join(job_aliases)}" if job_aliases else ""
    return "; ".join([f"{registration.model} version {version.version}{aliases}", *notes])
