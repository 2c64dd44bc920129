"""What keeps the containers of a pod from running, as far as the pod's own status says."""

from __future__ import annotations

from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator.batch.state import describe_pods

_PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


class Blockage(NamedTuple):
    """An obstacle that keeps a pod from running."""

    reason: ConditionReason
    message: str


def unschedulable_condition(pod: Json) -> Json | None:
    """The condition of a pod for which the scheduler finds no node, or None."""
    for item in pod.get("status", {}).get("conditions") or []:
        if item["type"] == "PodScheduled" and item.get("reason") == "Unschedulable":
            return dict(item)
    return None


def find_waiting_container(pod: Json) -> Blockage | None:
    """The first container that cannot start because of its image or its configuration, as a blockage; None without one."""
    status, where = pod.get("status", {}), describe_pods([pod])
    for item in (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or []):
        waiting = item.get("state", {}).get("waiting") or {}
        detail = waiting.get("message") or waiting.get("reason")
        if waiting.get("reason") in _PULL_REASONS:
            return Blockage(
                ConditionReason.IMAGE_PULL_FAILED,
                f"{where} cannot pull {item.get('image')}: {waiting['reason']}: {detail}",
            )
        if waiting.get("reason") in _CONFIG_REASONS:
            return Blockage(
                ConditionReason.CONTAINER_CONFIG_ERROR, f"{where} cannot start {item['name']}: {detail}"
            )
    return None
