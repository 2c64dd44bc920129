"""Deletion: by default the alias stays; with `onDelete: RemoveAlias`, a finalizer keeps the resource until the alias is removed."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.identity import find_difference
from finetune_operator.modelpromotion.decide.move import announce


def set_finalizer(draft: Draft) -> None:
    """Set the operator's finalizer if the alias is to be removed with the resource; otherwise remove the finalizer.

    The alias stays if it is another's (`_may_not_move`). If the spec cannot be read, nothing changes.
    """
    spec = draft.promotion.spec
    if spec is None:
        return
    needs_finalizer = spec.on_delete == "RemoveAlias" and not _may_not_move(draft)
    if needs_finalizer != (names.FINALIZER in draft.promotion.finalizers):
        draft.finalizer = needs_finalizer


def remove(draft: Draft) -> None:
    """Remove the alias if it still points at a version of this promotion (`_promoted_versions`); then remove the finalizer."""
    if names.FINALIZER not in draft.promotion.finalizers:
        return
    spec, problem = draft.promotion.spec, draft.observed.problem
    if spec is None or spec.on_delete != "RemoveAlias" or _may_not_move(draft):
        draft.finalizer = False
    elif problem and problem.reason == ConditionReason.CREDENTIALS_MISSING:
        # NB: the Secret cannot be created again in a namespace that is being deleted, so the deletion would wait forever.
        message = (
            f"the ModelPromotion is deleted, but alias {spec.alias} of {spec.model} remains because the operator cannot log in to the "
            f"registry ({problem.message}): remove the alias in the registry"
        )
        draft.set(ConditionType.REGISTRY_READY, False, problem.reason, message)
        # NB: the status disappears with the object, so an Event must show the message. `stop` sets the message for Promoted too, for
        # which each new message causes an Event; for RegistryReady, only a new reason does.
        draft.stop(problem.reason, message)
        draft.finalizer = False
    elif problem:
        message = (
            f"the deletion waits until the operator can remove alias {spec.alias} of {spec.model} in the registry ({problem.message}): to "
            "delete the ModelPromotion and keep the alias, set spec.onDelete to KeepAlias"
        )
        draft.set(ConditionType.REGISTRY_READY, False, problem.reason, message)
        draft.requeue_after(draft.settings.poll_seconds)
    elif draft.holder is None or draft.holder not in _promoted_versions(draft) or find_difference(draft):
        # The alias no longer exists, belongs to the client that moved it, or is in another registry.
        draft.finalizer = False
    else:
        announce(draft, f"removing alias {spec.alias} of {spec.model}")
        draft.actions.append(draft.move_alias(None))


def _may_not_move(draft: Draft) -> bool:
    """Whether the alias is another's: an older promotion or another installation manages it, or the tenancy does not permit it."""
    observed = draft.observed
    return observed.rival is not None or observed.ownership.state == "Foreign" or observed.refusal is not None


def _promoted_versions(draft: Draft) -> set[str | None]:
    """Return the versions of this promotion: the last that it gave the alias or took over with it, and the one of a move that is not recorded as done."""
    move = draft.status.move
    return {draft.status.promoted, move.to_version if move else None}
