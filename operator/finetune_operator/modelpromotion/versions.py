"""The versions of a registered model that matter in a pass. The observer reads them, and the policies decide about them."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.serving import Route
from finetune_operator.modelpromotion.model import Observed


def named_version(spec: ModelPromotionSpec, observed: Observed) -> str | None:
    """Return the version that the source names, which need not exist; None while the source names no version."""
    if spec.source.version:
        return spec.source.version
    if spec.source.alias:
        return observed.alias(spec.source.alias)
    if spec.source.registry:
        return observed.source_version.copy if observed.source_version else None
    job = observed.job
    return job.version if job and job.phase == "Succeeded" and job.model == spec.model else None


def target_version(spec: ModelPromotionSpec, status: ModelPromotionStatus) -> str | None:
    """The version that spec.rollbackTo names. NB: type Previous keeps the version that status.previous had in the first pass."""
    rollback_to, rollback = spec.rollback_to, status.rollback
    if rollback_to is None:
        return None
    if rollback_to.type == "Version":
        return rollback_to.version
    return rollback.version if rollback and rollback.requested == rollback_to.text else status.previous


def is_older(version: str, promoted: str | None) -> bool:
    """Whether a version was registered before the promoted one, so that a move to it goes back; True without a promoted version."""
    return promoted is None or int(version) < int(promoted)


def main_version(routes: Sequence[Route]) -> str | None:
    """The version with the largest share of the traffic; None without routes."""
    return max(routes, key=lambda route: route.percent).version if routes else None
