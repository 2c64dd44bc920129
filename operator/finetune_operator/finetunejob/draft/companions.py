"""Creates the Services, ConfigMaps and NetworkPolicies of a running step again when somebody has deleted them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from finetune_crds.base import Json
from finetune_operator.finetunejob.draft.draft import Draft


def restore_companions(
    draft: Draft, expected: Iterable[tuple[str, str]], build: Callable[[], list[Json]]
) -> None:
    """Apply those companions of a step whose Job exists that are known not to exist.

    Pods that the Job starts later mount the ConfigMap, and find each other by the Service.

    Args:
        expected: kind and name of each companion.
        build: builds all companions of the step.
    """
    existing = draft.observed.companions  # None if they are not known
    if existing is not None and not existing.issuperset(expected):
        draft.apply += [body for body in build() if (body["kind"], body["metadata"]["name"]) not in existing]
