"""Resolves `models:/name@alias` in `model.base` or the teacher to the version that the alias points at when the job begins.

Every pod of the job gets that version: the preparation, each attempt of the training and the evaluation. The alias may move
later. The alias need not exist when the job is applied, for example if another job trains the model first.
"""

from __future__ import annotations

from finetune_crds.aliased import Aliased
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import Pinned
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import POLL_SECONDS, SOON_SECONDS, Wait, wait
from finetune_operator.finetunejob.references import unpinned_aliases
from finetune_operator.policy.result import Continue, Outcome, Stop


def pin_versions(draft: Draft) -> Outcome:
    """End each pass until the status has the version of each alias, unless the job is suspended or has no MLflow server.

    A recorded version stays: later passes see it in the spec, in place of the alias.
    """
    aliases = {} if draft.spec.suspend else unpinned_aliases(draft.ftj)
    if not aliases:
        return Continue
    server, _ = draft.settings.servers(draft.spec.tracking)
    if not server:
        # NB: without a server, the pods report that they cannot find the model. A condition from a time with a server is outdated.
        draft.unset(ConditionType.MODELS_FOUND)
        return Continue
    if not draft.ftj.holds(ConditionType.ACCEPTED):
        # Registries are read for accepted jobs only, so for this job from the next pass on.
        draft.requeue_after(SOON_SECONDS)
        return Stop
    has_unread_alias = bool(aliases.keys() - draft.observed.alias_versions.keys())
    if has_unread_alias and draft.condition(ConditionType.MODELS_FOUND):
        # The registry was not read since the status was written: keep the message.
        draft.requeue_after(POLL_SECONDS)
        return Stop
    uris: dict[str, str] = {}
    for field, aliased in aliases.items():
        version = _find_version(draft, field, aliased)
        if isinstance(version, Wait):
            return wait(draft, ConditionType.MODELS_FOUND, version)
        uris[field] = f"models:/{aliased.model}/{version}"
    draft.update(pinned=(draft.status.pinned or Pinned()).model_copy(update=uris))
    message = "; ".join(
        f"models:/{aliased.model}@{aliased.alias} is {uris[field]} for all pods of this job"
        for field, aliased in aliases.items()
    )
    draft.set(ConditionType.MODELS_FOUND, True, ConditionReason.MODELS_FOUND, message)
    draft.requeue_after(0)
    return Stop


def _find_version(draft: Draft, field: str, aliased: Aliased) -> str | Wait:
    """The version that an alias points at, or why it is not known."""
    alias_version = draft.observed.alias_versions.get(field)
    name = f"models:/{aliased.model}@{aliased.alias}"
    if alias_version is None:
        return Wait(ConditionReason.WAITING_FOR_MODEL, f"the version of {name} is not known yet")
    if alias_version.problem:
        return Wait(
            alias_version.problem.reason,
            f"the version of {name} is not known: {alias_version.problem.message}",
        )
    if not alias_version.exists:
        return Wait(
            ConditionReason.WAITING_FOR_MODEL,
            f"the registered model {aliased.model} of {name} does not exist: this job starts when it has the alias "
            f"{aliased.alias}",
        )
    if alias_version.version is None:
        return Wait(
            ConditionReason.WAITING_FOR_ALIAS,
            (
                f"the registered model {aliased.model} has no alias {aliased.alias}: this job starts when a version has "
                "this alias"
            ),
        )
    return alias_version.version
