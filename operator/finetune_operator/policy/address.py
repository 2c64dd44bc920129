"""Finds passwords in the addresses of a spec."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds.modelpromotion import PromotionTracking
from finetune_crds.tracking import Tracking
from finetune_operator.settings import holds_password


def find_passwords(tracking: Tracking | PromotionTracking) -> Iterator[str]:
    """A message for each address that contains a password: statuses and logs would show it."""
    public = tracking.public_url if isinstance(tracking, Tracking) else None
    # NB: the addresses in a ModelPromotion are immutable, so the message asks for another object. A FineTuneJob fails for these
    # mistakes, and the message of its failure ends in how to apply a corrected job.
    where = "" if isinstance(tracking, Tracking) else " in a ModelPromotion with another name"
    for field, uri in (("uri", tracking.uri), ("registryUri", tracking.registry_uri), ("publicUrl", public)):
        if uri and holds_password(uri):
            yield (
                f"spec.tracking.{field} contains a password: move it to a Secret with MLFLOW_TRACKING_USERNAME and "
                f"MLFLOW_TRACKING_PASSWORD, and set spec.tracking.secretRef{where}"
            )
