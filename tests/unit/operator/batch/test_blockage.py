"""What keeps the containers of a pod from running."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.batch.blockage import Blockage, find_waiting_container

Json = dict[str, Any]


def pod(field: str, **state: Json) -> Json:
    status = {field: [{"name": "main", "image": "tests:1", "state": state}]}
    return {"metadata": {"name": "gate-0"}, "spec": {"nodeName": "node-1"}, "status": status}


CASES: dict[str, tuple[Json, Blockage | None]] = {
    "it runs": (pod("containerStatuses", running={}), None),
    "it is being created": (pod("containerStatuses", waiting={"reason": "ContainerCreating"}), None),
    "no image": (
        pod("containerStatuses", waiting={"reason": "ErrImagePull", "message": "not found"}),
        Blockage(
            ConditionReason.IMAGE_PULL_FAILED,
            "pod gate-0 on node node-1 cannot pull tests:1: ErrImagePull: not found",
        ),
    ),
    "no image for an init container, without a message": (
        pod("initContainerStatuses", waiting={"reason": "ImagePullBackOff"}),
        Blockage(
            ConditionReason.IMAGE_PULL_FAILED,
            "pod gate-0 on node node-1 cannot pull tests:1: ImagePullBackOff: ImagePullBackOff",
        ),
    ),
    "a Secret is missing": (
        pod("containerStatuses", waiting={"reason": "CreateContainerConfigError", "message": "no Secret"}),
        Blockage(
            ConditionReason.CONTAINER_CONFIG_ERROR, "pod gate-0 on node node-1 cannot start main: no Secret"
        ),
    ),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_a_container_that_waits(body: Json, expected: Blockage | None) -> None:
    assert find_waiting_container(body) == expected
