"""The tags of a version that got the alias: who moved it there, when, from where, and by which gates. Written after the move."""

from __future__ import annotations

import dataclasses

from finetune_crds.conditions import ConditionType
from finetune_crds.promotion_status import Move
from finetune_operator import names
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.model import PromotionDecision
from finetune_operator.policy.status import find_condition
from finetune_operator.settings import UNITY_CATALOG
from finetune_operator.text import format_time

# What the condition Promoted says if the registry refused the tags.
TAGS_REFUSED = "; the tags of the version cannot be set: "
# After such a move, the version keeps the tags of its promotion.
_UNTAGGED_REASONS = ("Repaired", "Overtaken", "Adopted")


def build_tags(draft: Draft, move: Move) -> dict[str, str]:
    """The tags of the version that a move gives the alias to; empty for a move without tags."""
    if move.to_version is None or move.reason in _UNTAGGED_REASONS:
        return {}
    _, registry = draft.settings.servers(draft.spec.tracking)
    # NB: names of tags in Unity Catalog must not contain hyphens, and names of aliases ignore the case.
    alias = draft.spec.alias
    alias = alias.casefold().replace("-", "_") if registry == UNITY_CATALOG else alias
    return {
        **draft.spec.tags,
        names.promotion_tag(alias, "by"): move.by,
        names.promotion_tag(alias, "at"): format_time(move.time),
        names.promotion_tag(alias, "from"): move.from_version or "none",
        names.promotion_tag(alias, "gates"): move.gates or "none",
    }


def tag_version(draft: Draft) -> None:
    """Set the tags that the version with the alias lacks, if the operator was stopped between the alias and the tags."""
    version = draft.status.untagged
    if version is None or draft.status.move is not None:
        return
    registered = draft.observed.versions.get(version)
    move = next((item for item in draft.status.history if item.to_version == version), None)
    tags = build_tags(draft, move) if move else {}
    is_tagged = registered is not None and tags.items() <= registered.tags.items()
    if is_tagged or draft.observed.lacks(version) or draft.holder != version:
        draft.remember(untagged=None)
        return
    draft.actions.append(draft.move_alias(version, tags=tags))
    _keep_refusal(draft)


def record_tags(decision: PromotionDecision) -> PromotionDecision:
    """Return the decision after the registry accepted the tags. NB: a registry may store other values, which are not written again."""
    status = decision.status.model_copy(update={"journal": decision.status.change_journal(untagged=None)})
    return dataclasses.replace(decision, status=status)


def _keep_refusal(draft: Draft) -> None:
    """Keep the refusal of the tags in the condition Promoted, which else would lose it in this pass and get it back."""
    condition = draft.condition(ConditionType.PROMOTED)
    before = find_condition(draft.promotion.status, ConditionType.PROMOTED)
    if condition and before and before.message.startswith(f"{condition.message}{TAGS_REFUSED}"):
        other_conditions = [item for item in draft.status.conditions if item.type != ConditionType.PROMOTED]
        draft.update(conditions=[*other_conditions, before])
