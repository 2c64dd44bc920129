"""The notices about a promotion: one for each new move in its history, and one for an alias that is removed with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from finetune_crds.base import API_VERSION, Json
from finetune_crds.modelpromotion import ModelPromotion, ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus, Move
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.notifications.model import Notice
from finetune_operator.text import format_time


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
    for move in reversed(status.history):
        yield _build_notice(
            promotion,
            spec,
            notice_id=_build_id(promotion, move),
            time=move.time,
            move=move.to_json(),
            sentence=f"{_describe(move.from_version)} -> {_describe(move.to_version)} by {move.by} ({move.reason}: {move.message})",
        )


def build_removal_notice(
    promotion: Promotion, spec: ModelPromotionSpec, version: str | None, now: datetime
) -> Notice:
    """Return the notice of an alias that was removed with its promotion, whose history disappears with it.

    Args:
        version: the version that the alias pointed at.
    """
    by, message = f"ModelPromotion {promotion.key}", "the ModelPromotion is deleted"
    return _build_notice(
        promotion,
        spec,
        notice_id=f"{promotion.uid}-removed",
        time=now,
        move={
            "fromVersion": version,
            "reason": "Removed",
            "message": message,
            "by": by,
            "time": format_time(now),
        },
        sentence=f"{_describe(version)} -> {_describe(None)} by {by} (Removed: {message})",
    )


def _build_notice(
    promotion: Promotion,
    spec: ModelPromotionSpec,
    *,
    notice_id: str,
    time: datetime,
    move: Json,
    sentence: str,
) -> Notice:
    subject = f"{spec.model}@{spec.alias}"
    place = {
        "namespace": promotion.namespace,
        "name": promotion.name,
        "model": spec.model,
        "alias": spec.alias,
    }
    return Notice(
        id=notice_id,
        source=f"/apis/{API_VERSION}/namespaces/{promotion.namespace}/{ModelPromotion.PLURAL}/{promotion.name}",
        subject=subject,
        model=spec.model,
        time=time,
        data=place | move,
        text=f"{subject}: {sentence}, ModelPromotion {promotion.key}",
    )


def _build_id(promotion: Promotion, move: Move) -> str:
    """Return an id that is equal for each status with the move: its time has seconds, in which an alias moves at most once to a version."""
    return f"{promotion.uid}-{int(move.time.timestamp())}-{move.to_version or 'none'}"


def _describe(version: str | None) -> str:
    return f"version {version}" if version else "no version"
