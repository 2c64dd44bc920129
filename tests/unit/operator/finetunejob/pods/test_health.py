"""What keeps pods from running, and what is only a matter of time."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.model import PodEvent
from fixtures.operator_in_memory.decisions import (
    NOW,
    SOURCE,
    child,
    conclude,
    ftj,
    later,
    observed,
    on_unready_node,
    pod,
    running,
    said,
    stamped,
)

Json = dict[str, Any]
JOB = "tune-train-1"
ADD_NODES = "; add nodes, or correct spec.pods, suspend the job and resume it"
FIRST, SECOND = "tune-train-1-0-abcde", "tune-train-1-1-abcde"


def held_up(index: int, reason: str, message: str = "", node: str = "") -> Json:
    waiting = {"reason": reason, **({"message": message} if message else {})}
    container = {"name": "trainer", "image": "me/mine:1", "state": {"waiting": waiting}}
    return pod(JOB, index, "Pending", ready=False, node=node, containerStatuses=[container])


def unschedulable(index: int, message: str = "no GPU", since: float | None = None) -> Json:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    if since is not None:
        scheduled["lastTransitionTime"] = stamped(since)
    return pod(JOB, index, "Pending", ready=False, conditions=[scheduled])


HEALTH: dict[str, tuple[list[Json], dict[str, str], tuple[str, str, str] | None]] = {
    "no pods yet": ([], {}, None),
    "no pods may be made": (
        [],
        {JOB: "pods of Job tune-train-1 cannot be created: quota"},
        ("False", ConditionReason.POD_REJECTED, "pods of Job tune-train-1 cannot be created: quota"),
    ),
    "some pods may not be made": (
        [pod(JOB, 0)],
        {JOB: "quota"},
        ("False", ConditionReason.POD_REJECTED, "quota"),
    ),
    "all is well": (
        [pod(JOB, 0), held_up(1, "ContainerCreating")],
        {},
        ("True", ConditionReason.PODS_RUNNING, "no pod is blocked"),
    ),
    "no image": (
        [pod(JOB, 0), held_up(1, "ErrImagePull", "not found", node="node-1")],
        {},
        (
            "False",
            ConditionReason.IMAGE_PULL_FAILED,
            "pod tune-train-1-1-abcde on node node-1 cannot pull me/mine:1: ErrImagePull: not found",
        ),
    ),
    "a container that cannot be made": (
        [held_up(0, "CreateContainerConfigError", 'secret "s" not found'), pod(JOB, 1)],
        {},
        (
            "False",
            ConditionReason.CONTAINER_CONFIG_ERROR,
            'pod tune-train-1-0-abcde cannot start trainer: secret "s" not found',
        ),
    ),
    "a node that is not ready": (
        [on_unready_node(pod(JOB, 0, node="node-1")), held_up(1, "ErrImagePull", "not found")],
        {},
        (
            "False",
            ConditionReason.NODE_NOT_READY,
            "the node of pod tune-train-1-0-abcde on node node-1 is not ready: if it does not return within distributed.nodeLostSeconds, "
            "Kubernetes evicts the pod and the step starts again on another node (2 of 2 pods wait)",
        ),
    ),
    "the earliest trouble outweighs": (
        [held_up(0, "ImagePullBackOff"), unschedulable(1)],
        {},
        (
            "False",
            ConditionReason.UNSCHEDULABLE,
            f"pod tune-train-1-1-abcde cannot be scheduled: no GPU (2 of 2 pods wait){ADD_NODES}",
        ),
    ),
    "a claim that is not bound": (
        [unschedulable(0, "0/3 nodes: pod has unbound immediate PersistentVolumeClaims", since=0)],
        {},
        (
            "False",
            ConditionReason.VOLUME_NOT_READY,
            "pod tune-train-1-0-abcde waits for a volume: 0/3 nodes: pod has unbound immediate "
            "PersistentVolumeClaims: check kubectl get pvc -n team",
        ),
    ),
    "an autoscaler is given its time": (
        [unschedulable(0, since=20)],
        {},
        ("True", ConditionReason.PODS_RUNNING, "no pod is blocked"),
    ),
    "and no more": (
        [unschedulable(0, since=10)],
        {},
        (
            "False",
            ConditionReason.UNSCHEDULABLE,
            f"pod tune-train-1-0-abcde cannot be scheduled: no GPU{ADD_NODES}",
        ),
    ),
}


@pytest.mark.parametrize(("pods", "rejections", "expected"), HEALTH.values(), ids=HEALTH)
def test_health(pods: list[Json], rejections: dict[str, str], expected: tuple[str, str, str] | None) -> None:
    observation = observed(child(JOB), pods=pods, rejections=rejections)
    assert said(conclude(ftj(running()), observation, at=later(30)), ConditionType.PODS_HEALTHY) == expected


def event(reason: str, message: str, at: float = 0) -> PodEvent:
    return PodEvent(reason, message, later(at))


SCALES = event("TriggeredScaleUp", "pod triggered scale-up: [{gpus 1->2 (max: 5)}]")
NOMINATED = event("Nominated", "Pod should schedule on: nodeclaim/gpus-x7", at=1)
DECLINED = event("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached", at=2)
NO_MOUNT = event("FailedMount", 'MountVolume.SetUp failed for volume "data": no such share', at=3)
NO_SANDBOX = event(
    "FailedCreatePodSandBox",
    f'Failed to create pod sandbox: failed to setup network for sandbox "{"0a" * 32}": no IP addresses available',
    at=3,
)
STARTING = pod(JOB, 0, "Pending", ready=False, node="node-1")
BOTH = [unschedulable(0), unschedulable(1)]
Events = dict[str, tuple[PodEvent, ...]]
MULTI_ATTACH = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) tune-train-1-0-abcde'

TOLD_BY_EVENTS: dict[str, tuple[list[Json], Events, float, tuple[str, str]]] = {
    "cluster-autoscaler adds a node": (
        [unschedulable(0)],
        {FIRST: (SCALES,)},
        60,
        (
            ConditionReason.SCALING_UP,
            f"pod {FIRST} waits for a node that is being added: {SCALES.message}",
        ),
    ),
    "Karpenter adds nodes, and Events are read of the first and the last pod": (
        [unschedulable(0), unschedulable(2), unschedulable(1)],
        {FIRST: (NOMINATED,), SECOND: (NOMINATED,)},
        60,
        (
            ConditionReason.SCALING_UP,
            f"pod {FIRST} waits for a node that is being added: {NOMINATED.message} (3 of 2 pods wait)",
        ),
    ),
    "a node for the first pod only": (
        BOTH,
        {FIRST: (SCALES,), SECOND: (SCALES, DECLINED)},
        60,
        (
            ConditionReason.UNSCHEDULABLE,
            f"pod {SECOND} cannot be scheduled: no GPU; {DECLINED.message} (2 of 2 pods wait){ADD_NODES}",
        ),
    ),
    "a node that never came": (
        [unschedulable(0)],
        {FIRST: (SCALES,)},
        900,
        (ConditionReason.UNSCHEDULABLE, f"pod {FIRST} cannot be scheduled: no GPU{ADD_NODES}"),
    ),
    "a volume that cannot be mounted": (
        [STARTING],
        {FIRST: (SCALES, NO_MOUNT)},
        60,
        (
            ConditionReason.VOLUME_NOT_READY,
            f"pod {FIRST} on node node-1 waits for a volume: {NO_MOUNT.message}",
        ),
    ),
    "a volume that a lost node still has": (
        [STARTING],
        {FIRST: (event("FailedAttachVolume", MULTI_ATTACH),)},
        60,
        (
            ConditionReason.VOLUME_NOT_READY,
            f"pod {FIRST} on node node-1 waits for a volume: {MULTI_ATTACH}; if that node is lost, delete it or give it the taint "
            "node.kubernetes.io/out-of-service",
        ),
    ),
    "a network that cannot be set up": (
        [STARTING],
        {FIRST: (event("FailedMount", "no volume", at=1), NO_SANDBOX)},
        60,
        (
            ConditionReason.SANDBOX_FAILED,
            f"pod {FIRST} on node node-1 cannot start: Failed to create pod sandbox: failed to setup network for sandbox: no IP "
            "addresses available: check the network plugin and the container runtime of the node",
        ),
    ),
    "a network that cannot be set up, behind a pod for which a node is added": (
        [unschedulable(0), pod(JOB, 1, "Pending", ready=False, node="node-1")],
        {FIRST: (SCALES,), "tune-train-1-1-abcde": (NO_SANDBOX,)},
        60,
        (
            ConditionReason.SANDBOX_FAILED,
            "pod tune-train-1-1-abcde on node node-1 cannot start: Failed to create pod sandbox: failed to setup network for sandbox: no "
            "IP addresses available: check the network plugin and the container runtime of the node (2 of 2 pods wait)",
        ),
    ),
    "a network that was set up in the end": (
        [STARTING],
        {FIRST: (NO_SANDBOX, event("Pulling", "Pulling image", at=9))},
        60,
        (ConditionReason.PODS_RUNNING, "no pod is blocked"),
    ),
    "a volume that was mounted in the end": (
        [STARTING],
        {FIRST: (NO_MOUNT, event("Pulling", "Pulling image", at=9))},
        60,
        (ConditionReason.PODS_RUNNING, "no pod is blocked"),
    ),
    "a pod that runs by now": (
        [pod(JOB, 0, node="node-1")],
        {FIRST: (NO_MOUNT,)},
        60,
        (ConditionReason.PODS_RUNNING, "no pod is blocked"),
    ),
}


@pytest.mark.parametrize(
    ("pods", "events", "seconds", "expected"), TOLD_BY_EVENTS.values(), ids=TOLD_BY_EVENTS
)
def test_what_events_tell(
    pods: list[Json], events: Events, seconds: float, expected: tuple[str, str]
) -> None:
    observation = observed(child(JOB), pods=pods, pod_events=events)
    condition = said(conclude(ftj(running()), observation, at=later(seconds)), ConditionType.PODS_HEALTHY)
    assert condition is not None
    assert condition[1:] == expected


def test_a_node_on_its_way_is_what_the_summary_says() -> None:
    observation = observed(child(JOB), pods=BOTH, pod_events={FIRST: (SCALES,)})
    condition = said(conclude(ftj(running()), observation, at=NOW), ConditionType.READY)
    assert condition is not None
    assert condition[:2] == ("False", ConditionReason.SCALING_UP)


PULLS = event("Pulling", 'Pulling image "trainer:1"')
PULLED = event("Pulled", "Successfully pulled image", at=9)
PULLING: dict[str, tuple[list[Json], Events, str]] = {
    "an image that is pulled": (
        [STARTING],
        {FIRST: (NO_MOUNT, PULLS)},
        'attempt 1: 0 of 2 pods are ready; pod tune-train-1-0-abcde on node node-1: Pulling image "trainer:1"',
    ),
    "one that was pulled": ([STARTING], {FIRST: (PULLS, PULLED)}, "attempt 1: 0 of 2 pods are ready"),
    "a pod that runs by now": (
        [pod(JOB, 0, node="node-1")],
        {FIRST: (PULLS,)},
        "attempt 1: 1 of 2 pods are ready",
    ),
}


@pytest.mark.parametrize(("pods", "events", "message"), PULLING.values(), ids=PULLING)
def test_an_image_that_takes_long_is_told(pods: list[Json], events: Events, message: str) -> None:
    observation = observed(child(JOB), pods=pods, pod_events=events)
    condition = said(conclude(ftj(running()), observation, at=later(60)), ConditionType.TRAINED)
    assert condition == ("False", ConditionReason.STARTING, message)


def test_an_image_of_the_preparation_too() -> None:
    starting = pod("tune-prep", 0, "Pending", ready=False, node="node-1", component="prep")
    observation = observed(child("tune-prep"), pods=[starting], pod_events={"tune-prep-0-abcde": (PULLS,)})
    condition = said(conclude(ftj(data=SOURCE), observation, at=later(60)), ConditionType.PREPARED)
    assert condition is not None
    assert condition[2] == (
        'the prep pod is starting; pod tune-prep-0-abcde on node node-1: Pulling image "trainer:1"; kubectl logs '
        "job/tune-prep shows its progress"
    )


GPU_POD = pod(JOB, 0, "Pending", ready=False, gpus=8, conditions=unschedulable(0)["status"]["conditions"][1:])
NO_GPU = "pod tune-train-1-0-abcde cannot be scheduled: no GPU"
OFFERED: dict[str, tuple[Json, frozenset[str] | None, str]] = {
    "nodes that cannot be read": (GPU_POD, None, NO_GPU + ADD_NODES),
    "a node with GPUs": (GPU_POD, frozenset({"cpu", "nvidia.com/gpu"}), NO_GPU + ADD_NODES),
    "no node with GPUs": (
        GPU_POD,
        frozenset({"cpu"}),
        f"{NO_GPU}; no node offers nvidia.com/gpu: check that its device plugin is installed",
    ),
    "a pod without GPUs": (unschedulable(0), frozenset({"cpu"}), NO_GPU + ADD_NODES),
}


@pytest.mark.parametrize(("pod_body", "offered_resources", "message"), OFFERED.values(), ids=OFFERED)
def test_a_gpu_that_no_node_offers_is_named(
    pod_body: Json, offered_resources: frozenset[str] | None, message: str
) -> None:
    decision = conclude(
        ftj(running()), observed(child(JOB), pods=[pod_body], offered_resources=offered_resources)
    )
    assert said(decision, ConditionType.PODS_HEALTHY) == ("False", ConditionReason.UNSCHEDULABLE, message)
