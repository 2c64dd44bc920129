"""`models:/name@alias` as `model.base` or as the teacher: the version that the alias points at when the job begins.

Every pod of the job gets that version: the preparation, each attempt of the training and the evaluation. The alias may move
meanwhile, and may not exist yet when the job is applied, such as that of a model which another job trains first.
"""

from __future__ import annotations

from finetune_crds.aliased import Aliased
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import Pinned
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import SOON_SECONDS, Wait, wait
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.policy.result import Continue, Outcome, Stop


def is_unpinned(ftj: FineTuneJob) -> bool:
    """Whether the job still needs versions for its aliases, also while it is suspended; without them it has no run."""
    return bool(_unpinned_aliases(ftj))


def aliases_to_resolve(ftj: FineTuneJob) -> dict[str, Aliased]:
    """The aliases to resolve, by the field of `status.pinned`; empty while the job does not run.

    NB: the address of the registry in a job that is not accepted may hold a password.
    """
    if ftj.spec is None or ftj.spec.suspend or not ftj.holds(ConditionType.ACCEPTED):
        return {}
    return _unpinned_aliases(ftj)


def _unpinned_aliases(ftj: FineTuneJob) -> dict[str, Aliased]:
    """The aliases whose versions a job lacks.

    A job that an earlier version of the operator started keeps its aliases: its pods have looked them up.
    """
    if ftj.spec is None or ftj.is_finished or ftj.deleting or ftj.status.start_time:
        return {}
    model, distillation = ftj.spec.model, ftj.spec.objective.distillation
    uris = {"base": model.base if model else None, "teacher": distillation.teacher if distillation else None}
    return {field: aliased for field, uri in uris.items() if (aliased := Aliased.of(uri))}


def pin_versions(draft: Draft) -> Outcome:
    """End the pass until the versions are known. A pinned version does not change; the next pass has it in the spec."""
    aliases = {} if draft.spec.suspend else _unpinned_aliases(draft.ftj)
    if not aliases or not draft.settings.servers(draft.spec.tracking)[0]:
        # NB: without a server the pods say that they cannot find the model. The condition is of when there was one.
        if aliases:
            draft.unset(ConditionType.MODELS_FOUND)
        return Continue
    if not draft.ftj.holds(ConditionType.ACCEPTED):
        # Registries are asked for accepted jobs alone, and so before the next pass.
        draft.requeue_after(SOON_SECONDS)
        return Stop
    uris: dict[str, str] = {}
    for field, aliased in aliases.items():
        version = _find_version(draft, field, aliased)
        if isinstance(version, Wait):
            return wait(draft, ConditionType.MODELS_FOUND, version)
        uris[field] = f"models:/{aliased.model}/{version}"
    draft.update(pinned=(draft.status.pinned or Pinned()).model_copy(update=uris))
    pairs = zip(aliases.values(), uris.values(), strict=True)
    message = "; ".join(
        f"models:/{aliased.model}@{aliased.alias} is {uri} for all pods of this job" for aliased, uri in pairs
    )
    draft.set(ConditionType.MODELS_FOUND, True, ConditionReason.MODELS_FOUND, message)
    draft.requeue_after(0)
    return Stop


def _find_version(draft: Draft, field: str, aliased: Aliased) -> str | Wait:
    """The version that an alias points at, or why it is not known."""
    alias_version, name = draft.observed.alias_versions.get(field), f"models:/{aliased.model}@{aliased.alias}"
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
            f"the registered model {aliased.model} has no alias {aliased.alias}: this job starts when a version has it",
        )
    return alias_version.version
