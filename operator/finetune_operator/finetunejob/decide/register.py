"""Registration: only the operator writes the aliases of the version that the trainer created.

Aliases that a ModelPromotion manages are left to it: two writers would overwrite each other's moves.
"""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import Register
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import SetAlias
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion


def register(draft: Draft) -> Outcome:
    """Point the aliases at the version of this run; the pass ends while they do not."""
    wanted = draft.spec.register_
    if wanted is None or draft.holds(ConditionType.REGISTERED):
        return Continue
    found = draft.observed.mlflow.version if draft.observed.mlflow else None
    if found is None:
        return Stop
    owned = draft.observed.owned
    missing = [alias for alias in wanted.aliases if alias not in found.aliases and alias not in owned]
    if missing:
        draft.actions += [SetAlias(wanted.model, alias, found.version) for alias in missing]
        draft.set(
            ConditionType.REGISTERED, False, ConditionReason.REGISTERING, f"setting {', '.join(missing)}"
        )
        return Stop
    draft.set(ConditionType.REGISTERED, True, ConditionReason.REGISTERED, _registered(wanted, found, owned))
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
