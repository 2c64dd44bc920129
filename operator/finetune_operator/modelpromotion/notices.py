"""The notices about a promotion: one for each new move in its history."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds.base import API_VERSION
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.promotion_status import ModelPromotionStatus, Move
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.notifications.model import Notice


def list_new_notices(promotion: Promotion, after: ModelPromotionStatus) -> Iterator[Notice]:
    """Yield a notice for each move in the new history that the promotion's status does not have, the oldest first."""
    before = {_build_id(promotion, move) for move in promotion.status.history}
    for notice in list_notices(promotion, after):
        if notice.id not in before:
            yield notice


def list_notices(promotion: Promotion, status: ModelPromotionStatus) -> Iterator[Notice]:
    """Yield a notice for each move in a history, the oldest first; none if the spec cannot be read."""
    spec = promotion.spec
    if spec is None:
        return
    subject = f"{spec.model}@{spec.alias}"
    for move in reversed(status.history):
        yield Notice(
            id=_build_id(promotion, move),
            source=f"/apis/{API_VERSION}/namespaces/{promotion.namespace}/{ModelPromotion.PLURAL}/{promotion.name}",
            subject=subject,
            model=spec.model,
            time=move.time,
            data={
                "namespace": promotion.namespace,
                "name": promotion.name,
                "model": spec.model,
                "alias": spec.alias,
            }
            | move.to_json(),
            text=(
                f"{subject}: {_describe(move.from_version)} -> {_describe(move.to_version)} by {move.by} "
                f"({move.reason}: {move.message}), ModelPromotion {promotion.key}"
            ),
        )


def _build_id(promotion: Promotion, move: Move) -> str:
    """Return an id that is equal for each status with the move: its time has seconds, in which an alias moves at most once to a version."""
    return f"{promotion.uid}-{int(move.time.timestamp())}-{move.to_version or 'none'}"


def _describe(version: str | None) -> str:
    return f"version {version}" if version else "no version"
