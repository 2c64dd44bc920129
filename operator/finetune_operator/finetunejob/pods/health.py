"""The obstacles that keep pods from running: no node, an image, a volume, a network, a Secret or a quota; and temporary delays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.batch.blockage import Blockage, find_waiting_container, unschedulable_condition
from finetune_operator.batch.state import describe_pods, is_being_deleted
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.draft import device
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import PodEvent
from finetune_operator.finetunejob.pods import pod_state

# Events, by their reasons, of cluster-autoscaler and of Karpenter: a node is being added for the pod.
_SCALE_UP_EVENTS = frozenset({"TriggeredScaleUp", "Nominated"})
# Events of cluster-autoscaler: no node will be added for the pod.
_NO_SCALE_UP_EVENTS = frozenset({"NotTriggerScaleUp"})
# Events of the kubelet and of the attach-detach controller: a volume is missing.
_VOLUME_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
# Events of the kubelet: the pod has no sandbox, and so no network.
_SANDBOX_EVENTS = frozenset({"FailedCreatePodSandBox"})
# Removed from messages: each sandbox has a new id, and each change of a message writes the status.
_SANDBOX_ID = re.compile(r' "?[0-9a-f]{64}"?')
# In the message of the attach-detach controller: a ReadWriteOnce volume is still attached to another node.
_STILL_ATTACHED = "Multi-Attach error"
# Events of containers that start. By then, their pod has its volumes and its network.
_CONTAINER_EVENTS = frozenset({"Pulling", "Pulled", "Created", "Started"})
# How long an autoscaler may take to notice a pod. Until then, a pod without a node is not blocked.
_AUTOSCALER_TIMEOUT = timedelta(seconds=20)
# How long an autoscaler may take to add a node. cluster-autoscaler and Karpenter give up after the same time.
_NODE_TIMEOUT = timedelta(minutes=15)
# Reasons of PodsHealthy for a child that could not be created.
_REFUSALS = frozenset(
    {ConditionReason.NAME_TAKEN, ConditionReason.POD_REJECTED, ConditionReason.POD_TEMPLATE_INVALID}
)


# When pods have several blockages, the first in this order is reported.
_PRIORITY = (
    ConditionReason.NODE_NOT_READY,
    ConditionReason.UNSCHEDULABLE,
    ConditionReason.VOLUME_NOT_READY,
    ConditionReason.IMAGE_PULL_FAILED,
    ConditionReason.CONTAINER_CONFIG_ERROR,
    ConditionReason.SANDBOX_FAILED,
    ConditionReason.SCALING_UP,
)


def _rank(reason: ConditionReason) -> int:
    """The position of a reason in _PRIORITY; all other reasons come last."""
    return _PRIORITY.index(reason) if reason in _PRIORITY else len(_PRIORITY)


def forget_refusal(draft: Draft) -> None:
    """Remove the condition about a rejected child before the child is created again; another rejection sets the condition again."""
    healthy = draft.condition(ConditionType.PODS_HEALTHY)
    if healthy and healthy.reason in _REFUSALS:
        draft.unset(ConditionType.PODS_HEALTHY)


def find_blockage(draft: Draft, alive: Sequence[Json], job_name: str, *, desired: int) -> Blockage | None:
    """The blockage to report for pods that do not run; None if none is known.

    Args:
        alive: the pods of a Job that have not ended.
        desired: the number of pods that the Job should have.
    """
    blockages = _find_pod_blockages(alive, draft.observed.pod_events, draft.now)
    if blockages:
        reason, message = min(blockages, key=lambda item: _rank(item.reason))
        more = f" ({len(blockages)} of {desired} pods wait)" if len(blockages) > 1 else ""
        remedy = (
            _describe_missing_node_remedy(draft, alive) if reason == ConditionReason.UNSCHEDULABLE else ""
        )
        return Blockage(reason, message + more + remedy)
    if len(alive) < desired and job_name in draft.observed.rejections:
        return Blockage(ConditionReason.POD_REJECTED, draft.observed.rejections[job_name])
    return None


def report_blockage(draft: Draft, alive: Sequence[Json], blockage: Blockage | None) -> None:
    """Report in a condition what keeps pods from running; with neither pods nor a blockage, keep the condition."""
    if blockage:
        draft.set(ConditionType.PODS_HEALTHY, False, *blockage)
    elif alive:
        draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "no pod is blocked")


def _describe_missing_node_remedy(draft: Draft, alive: Sequence[Json]) -> str:
    """Return the remedy for pods that cannot be scheduled, as the end of a sentence."""
    missing_resources = _find_missing_resources(draft, alive)
    if missing_resources:
        return f"; no node offers {', '.join(missing_resources)}: check that its device plugin is installed"
    # NB: a correction of spec.pods does not change existing pods.
    return "; add nodes, or correct spec.pods, suspend the job and resume it"


def _find_missing_resources(draft: Draft, alive: Sequence[Json]) -> list[str]:
    """The GPU resources that the pods request and no node offers; empty if nodes cannot be read."""
    offered_resources = draft.observed.offered_resources
    if offered_resources is None:
        return []
    requested = {
        name for pod in alive for name in device.gpu_resources(pod, device.configured_resource(draft.ftj))
    }
    return sorted(requested - offered_resources)


def _find_pod_blockages(
    alive: Sequence[Json], events: Mapping[str, Sequence[PodEvent]], now: datetime
) -> list[Blockage]:
    """The blockages of pods.

    NB: Events are read for only a few of the pods that cannot be scheduled. The pods of a gang are alike, so any pod whose Events are not read
    is explained by the Events of another pod: of the last one that cannot be scheduled and whose Events are read.

    Args:
        events: Events, oldest first, by the name of their pod.
    """
    unschedulable = [pod["metadata"]["name"] for pod in alive if unschedulable_condition(pod)]
    names_with_events = [name for name in unschedulable if name in events]
    shared_events = events[names_with_events[-1]] if names_with_events else ()
    blockages = (
        _find_pod_blockage(pod, events.get(pod["metadata"]["name"], shared_events), now) for pod in alive
    )
    return [item for item in blockages if item is not None]


def _find_pod_blockage(pod: Json, events: Sequence[PodEvent], now: datetime) -> Blockage | None:
    """Find the obstacle that keeps a pod from running, or None.

    Args:
        events: Events about the pod, the oldest first.
    """
    if children.is_on_unready_node(pod):
        return Blockage(ConditionReason.NODE_NOT_READY, _describe_unready_node(pod))
    unscheduled = unschedulable_condition(pod)
    if unscheduled:
        return _explain_missing_node(pod, unscheduled, events, now)
    return find_waiting_container(pod) or _find_failed_event(pod, events)


def _describe_unready_node(pod: Json) -> str:
    if is_being_deleted(pod):
        return pod_state.describe_lost_pod(pod)
    return (
        f"the node of {describe_pods([pod])} is not ready: if it does not return within distributed.nodeLostSeconds, "
        "Kubernetes evicts the pod and the step starts again on another node"
    )


def _explain_missing_node(
    pod: Json, unscheduled: Json, events: Sequence[PodEvent], now: datetime
) -> Blockage | None:
    """Explain why a pod has no node; None while an autoscaler may not have noticed the pod."""
    name, message = pod["metadata"]["name"], unscheduled.get("message", "").rstrip(".")
    last = _last_event(events, _SCALE_UP_EVENTS | _NO_SCALE_UP_EVENTS)
    if last and last.reason in _SCALE_UP_EVENTS and now - last.at < _NODE_TIMEOUT:
        return Blockage(
            ConditionReason.SCALING_UP, f"pod {name} waits for a node that is being added: {last.message}"
        )
    if "persistentvolumeclaim" in message.lower():
        remedy = f"check kubectl get pvc -n {pod['metadata']['namespace']}"
        return Blockage(
            ConditionReason.VOLUME_NOT_READY, f"pod {name} waits for a volume: {message}: {remedy}"
        )
    since = unscheduled.get("lastTransitionTime")
    if since and now - datetime.fromisoformat(since) < _AUTOSCALER_TIMEOUT:
        return None
    declined = f"; {last.message}" if last and last.reason in _NO_SCALE_UP_EVENTS else ""
    return Blockage(ConditionReason.UNSCHEDULABLE, f"pod {name} cannot be scheduled: {message}{declined}")


def _find_failed_event(pod: Json, events: Sequence[PodEvent]) -> Blockage | None:
    """Describe the volume or the sandbox that a pod with a node waits for, which only Events report; None if it waits for neither."""
    last = _last_event(events, _VOLUME_EVENTS | _SANDBOX_EVENTS | _CONTAINER_EVENTS)
    if not is_pending_on_node(pod) or last is None:
        return None
    where = describe_pods([pod])
    if last.reason in _VOLUME_EVENTS:
        remedy = (
            "; if that node is lost, delete it or give it the taint node.kubernetes.io/out-of-service"
            if _STILL_ATTACHED in last.message
            else ""
        )
        return Blockage(
            ConditionReason.VOLUME_NOT_READY, f"{where} waits for a volume: {last.message}{remedy}"
        )
    if last.reason in _SANDBOX_EVENTS:
        cause = _SANDBOX_ID.sub("", last.message)
        remedy = "check the network plugin and the container runtime of the node"
        return Blockage(ConditionReason.SANDBOX_FAILED, f"{where} cannot start: {cause}: {remedy}")
    return None


def describe_image_pull(draft: Draft, alive: Sequence[Json]) -> str:
    """Name the pod that pulls an image, as the end of a sentence; empty if no pull is known."""
    for pod in alive:
        last = _last_event(draft.observed.pod_events.get(pod["metadata"]["name"], ()), _CONTAINER_EVENTS)
        if is_pending_on_node(pod) and last and last.reason == "Pulling":
            return f"; {describe_pods([pod])}: {last.message}"
    return ""


def is_pending_on_node(pod: Json) -> bool:
    """Whether a pod has a node and no container of it runs yet."""
    return bool(pod.get("spec", {}).get("nodeName")) and pod.get("status", {}).get("phase") == "Pending"


def _last_event(events: Sequence[PodEvent], reasons: frozenset[str]) -> PodEvent | None:
    return next((event for event in reversed(events) if event.reason in reasons), None)
