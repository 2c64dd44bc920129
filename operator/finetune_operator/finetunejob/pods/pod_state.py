"""The state of pods: which are alive and ready, how they ended, which failure came first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.contract import TerminationMessage
from finetune_crds.masking import mask_recognized
from finetune_crds.status import LastFailure
from finetune_operator import names
from finetune_operator.batch.state import describe_pods, find_node, is_alive
from finetune_operator.finetunejob import children
from finetune_operator.text import keep_last_lines

REASON_OF_EXIT = {
    contract.EXIT_RECIPE: ConditionReason.RECIPE_WRONG,
    contract.EXIT_DATA: ConditionReason.DATA_WRONG,
}
"""The reason with which a job fails, for each exit code of a pod, driver or run after which no other attempt can succeed."""

UNEXPLAINED = "Error"
"""The kubelet's reason for a container that ended with a nonzero code and without a more specific reason."""
_NEVER_STARTED = "ContainerStatusUnknown"
_NODE_LOST = "NodeLost"
# The exit code after SIGKILL.
_SIGKILL_CODE = 137
# The reason of the condition DisruptionTarget of a pod whose node was deleted (pkg/controller/podgc, 1.37).
_NODE_DELETED = "DeletionByPodGC"

# The main containers of the operator's pods. The pods of Spark's executors have other containers.
_MAIN = (names.PREP_CONTAINER, names.TRAINER_CONTAINER, names.EVALUATE_CONTAINER)
# By main container: the operator's init containers, which get the limits of that main container.
_INIT_CONTAINERS_OF = {
    names.TRAINER_CONTAINER: (names.CHECKOUT_CONTAINER, names.DEPENDENCIES_CONTAINER),
    names.EVALUATE_CONTAINER: (names.FETCH_CONTAINER,),
}


@dataclass(frozen=True)
class Exit:
    """How the main container of a pod ended, or the init container that kept it from starting."""

    pod: str
    container: str | None
    """None if no container terminated."""
    node: str | None
    node_rank: int | None
    code: int
    reason: str
    finished_at: str
    """RFC 3339; empty if unknown."""
    text: str
    """The termination message; empty without one."""
    evicted: bool
    deletion_request_time: datetime | None = None
    """When somebody requested the deletion of the pod; None if nobody did."""
    is_outlived: bool = False
    """Whether the pod's phase does not show how the container ended, since another container still runs or failed."""

    @property
    def message(self) -> TerminationMessage | None:
        """The structured termination message; None when the pod wrote none."""
        return TerminationMessage.parse(self.text)


def alive(pods: Iterable[Json]) -> list[Json]:
    """The pods that have not ended; one that is being deleted counts."""
    return [pod for pod in pods if is_alive(pod)]


def describe_lost_pod(pod: Json) -> str:
    """Describe where a lost pod is, and when Kubernetes deletes it.

    NB: the operator does not force the deletion. Kubernetes does, once a pod certainly no longer runs: the pod garbage collector
    deletes the pods of a node that no longer exists or has the taint out-of-service (pkg/controller/podgc, 1.37).
    """
    name, node = pod["metadata"]["name"], find_node(pod)
    why = (
        "is not ready" if children.is_on_unready_node(pod) else "did not stop the pod within its grace period"
    )
    return (
        f"pod {name} is still on node {node}, which {why}: Kubernetes deletes the pod when its containers stop, or when the node is "
        "deleted or gets the taint node.kubernetes.io/out-of-service"
    )


def describe_stale(component_children: children.ComponentChildren, owner: str = "") -> str:
    """Describe what a new Job waits for, to follow "waits for": stale pods or, without any, the first stale Job.

    Args:
        owner: the attempt that the pods and Jobs belong to, for example " of the previous attempt".
    """
    pods = component_children.stale_pods
    if not pods:
        return f"Job {component_children.stale_jobs[0]['metadata']['name']}{owner} to stop"
    if len(pods) == 1:
        return f"{describe_pods(pods)}{owner} to stop"
    return f"{len(pods)} pods{owner} to stop: {describe_pods(pods)}"


def count_ready(pods: Iterable[Json]) -> int:
    """How many pods run and are ready, or have succeeded."""
    return sum(map(is_ready, pods))


def is_ready(pod: Json) -> bool:
    """Whether a pod runs and is ready, or has succeeded."""
    status = pod.get("status", {})
    runs = any(
        item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or []
    )
    return runs or status.get("phase") == "Succeeded" or _containers_succeeded(status)


def _containers_succeeded(status: Json) -> bool:
    """Whether the main container exited with 0; in a pod without a container in _MAIN, whether all containers did.

    The kubelet reports these exits shortly before the phase Succeeded, or long before if another container keeps running.
    """
    statuses = status.get("containerStatuses") or []
    main_statuses = [item for item in statuses if item["name"] in _MAIN]
    decisive_statuses = main_statuses or statuses
    terminated = [item.get("state", {}).get("terminated") or {} for item in decisive_statuses]
    return bool(terminated) and all(item.get("exitCode") == 0 for item in terminated)


def has_run(pod: Json) -> bool:
    """Whether a container of a pod has started, to the kubelet's knowledge."""
    return any(_has_started(item.get("state", {})) for item in _list_statuses(pod.get("status", {})))


def _list_statuses(status: Json) -> list[Json]:
    """The statuses of the containers and init containers of a pod."""
    return [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]


def _has_started(state: Json) -> bool:
    # NB: when a pod is stopped before a container starts, the kubelet gives this container an end with this reason and without a start.
    terminated = state.get("terminated", {})
    is_unknown = terminated.get("reason") == _NEVER_STARTED and not terminated.get("startedAt")
    return "running" in state or (bool(terminated) and not is_unknown)


def exits(pods: Iterable[Json], container: str) -> list[Exit]:
    """How the pods' main containers ended, the earliest first."""
    ends = [ended for pod in pods if (ended := _find_exit(pod, container)) is not None]
    return sorted(ends, key=lambda item: (item.finished_at, item.node_rank or 0))


def _find_exit(pod: Json, container: str) -> Exit | None:
    """How a pod ended; None while its main container has not ended and can still start or run."""
    status = pod.get("status", {})
    disruptions = [
        item.get("reason")
        for item in status.get("conditions") or []
        if item["type"] == "DisruptionTarget" and item["status"] == "True"
    ]
    evicted, node_deleted = bool(disruptions), _NODE_DELETED in disruptions
    ended = _find_terminated(status, container)
    if ended:
        name, terminated = ended
        return Exit(
            pod=pod["metadata"]["name"],
            container=name,
            node=find_node(pod),
            node_rank=children.node_rank(pod),
            code=int(terminated.get("exitCode", 0)),
            reason=terminated.get("reason") or UNEXPLAINED,
            finished_at=terminated.get("finishedAt") or "",
            text=terminated.get("message") or "",
            evicted=evicted,
            deletion_request_time=children.find_deletion_request_time(pod),
            is_outlived=name == container and _is_outlived(status, failed=bool(terminated.get("exitCode"))),
        )
    if status.get("phase") == "Failed":
        # No container terminated: the node rejected or evicted the pod, or no longer exists.
        reason, text = status.get("reason") or "PodFailed", status.get("message") or ""
        if node_deleted:
            reason, text = _NODE_LOST, f"node {find_node(pod)} no longer exists"
        return Exit(
            pod=pod["metadata"]["name"],
            container=None,
            node=find_node(pod),
            node_rank=children.node_rank(pod),
            # There is no exit code: use that of SIGKILL.
            code=_SIGKILL_CODE,
            reason=reason,
            # The end is unknown: use the start.
            finished_at=status.get("startTime") or "",
            text=text,
            evicted=evicted,
        )
    return None


def find_deleted_pod(ends: Sequence[Exit]) -> Exit | None:
    """The pod that somebody deleted while all main containers ran; None without such a pod. An evicted or preempted pod does not count.

    NB: once a container has ended, the Job controller deletes the other pods, so a deletion after the first end is not the cause.
    """
    end_times = [datetime.fromisoformat(item.finished_at) for item in ends if item.finished_at]
    if not end_times:
        return None
    first_end = min(end_times)
    for item in ends:
        request_time = item.deletion_request_time
        if request_time is not None and request_time < first_end and not item.evicted:
            return item
    return None


def _is_outlived(status: Json, *, failed: bool) -> bool:
    """Whether another container keeps a pod running, or made it fail, after the main container ended.

    NB: init containers that restart (sidecars) do not count: they end with the main container, and how they end does not matter.

    Args:
        failed: whether the main container has failed itself.
    """
    states = [item.get("state", {}) for item in status.get("containerStatuses") or []]
    runs = status.get("phase") == "Running" and any("terminated" not in state for state in states)
    return runs or (status.get("phase") == "Failed" and not failed)


def _find_terminated(status: Json, container: str) -> tuple[str, Json] | None:
    """The name and terminated state of the container or, once the pod failed, of the init container that kept it from starting."""
    ended = [
        (item["name"], dict(terminated))
        for item in _list_statuses(status)
        if (terminated := item.get("state", {}).get("terminated"))
    ]
    for name, terminated in ended:
        if name == container:
            return name, terminated
    if status.get("phase") != "Failed":
        return None
    for name, terminated in ended:
        if terminated.get("exitCode"):
            text = terminated.get("message")
            return name, terminated | {"message": _prefix_init_container(name, text) if text else ""}
    return None


def _prefix_init_container(name: str, text: str) -> str:
    """Add the name of an init container to its termination message."""
    report = TerminationMessage.parse(text)
    if report is None or report.error is None:
        return f"init container {name}: {text}"
    error = report.error.model_copy(update={"message": f"init container {name}: {report.error.message}"})
    return report.model_copy(update={"error": error}).dump()


def last_failure(
    pods: Iterable[Json], container: str, attempt: int, use_less: str = ""
) -> LastFailure | None:
    """The newest failure among pods that ran one after the other.

    Args:
        use_less: how the container can use less memory, as a part of a sentence; empty if unknown.
    """
    failed = [item for item in exits(pods, container) if item.code != 0]
    return (
        _build_failure(failed[-1], container, attempt, ranks_per_node=1, use_less=use_less)
        if failed
        else None
    )


def first_failure(
    pods: Iterable[Json], container: str, attempt: int, ranks_per_node: int = 1, use_less: str = ""
) -> LastFailure | None:
    """The failure that ended an attempt.

    When one rank fails, the others lose their connections and fail too, often within the same second. So pods
    that report their own error come first, then pods that report nothing, then pods that report the loss of their peers. Among equals,
    the earliest counts.

    Args:
        use_less: how the container can use less memory, as a part of a sentence; empty if unknown.
    """
    failed = [item for item in exits(pods, container) if item.code != 0]
    if not failed:
        return None
    own_errors = [item for item in failed if _has_own_error(item)]
    without_error = [item for item in failed if not (item.message and item.message.error)]
    # If both are empty, all pods report the loss of their peers.
    candidates = own_errors or without_error or failed
    return _build_failure(candidates[0], container, attempt, ranks_per_node=ranks_per_node, use_less=use_less)


def has_crashed(ends: Iterable[Exit], lost_pods: Iterable[Json]) -> bool:
    """Whether a rank failed for a reason other than a request to stop or the loss of its peers.

    While a node is not ready, an end without a message does not count: the peers on that node may no longer respond.
    """
    failed = [item for item in ends if item.code not in (0, contract.EXIT_PREEMPTED)]
    if any(_has_own_error(item) or item.reason == "OOMKilled" for item in failed):
        return True
    has_unready_node = any(map(children.is_on_unready_node, lost_pods))
    return not has_unready_node and any(item.message is None for item in failed)


def _has_own_error(ended: Exit) -> bool:
    error = ended.message.error if ended.message and ended.code else None
    return error is not None and error.reason != "PeerLost"


def find_loss(
    pods: Iterable[Json], now: datetime, *, attempt: int, ranks_per_node: int = 1
) -> LastFailure | None:
    """The first pod that is lost with its node; None if no pod is lost."""
    for pod in pods:
        if children.is_lost(pod, now):
            return LastFailure(
                pod=pod["metadata"]["name"],
                node=find_node(pod),
                # With one rank per node, the rank is the node rank.
                rank=children.node_rank(pod) if ranks_per_node == 1 else None,
                reason=_NODE_LOST,
                message=describe_lost_pod(pod),
                attempt=attempt,
            )
    return None


def _build_failure(
    cause: Exit, container: str, attempt: int, ranks_per_node: int, use_less: str
) -> LastFailure:
    """The failure of a pod: the error that it reported or, without a report, the end of its log."""
    error = cause.message.error if cause.message else None
    # NB: a user's own command may report an error, too.
    message = mask_recognized(error.message) if error else keep_last_lines(cause.text)
    rank = error.rank if error else None
    if rank is None and cause.node_rank is not None and ranks_per_node == 1:
        rank = cause.node_rank
    return LastFailure(
        pod=cause.pod,
        node=cause.node,
        rank=rank,
        exit_code=cause.code,
        reason=error.reason if error else _find_reason(cause),
        message=message or _default_message(cause, container, use_less),
        attempt=attempt,
    )


def _find_reason(ended: Exit) -> str:
    return "Evicted" if ended.evicted and ended.reason == UNEXPLAINED else ended.reason


def _default_message(ended: Exit, container: str, use_less: str) -> str:
    """The message for a container that reported none."""
    subject, log = "the container", ended.pod
    remedy = f"raise the limit, or {use_less}" if use_less else "raise the limit"
    if ended.container not in (None, container):
        subject, log = f"init container {ended.container}", f"{ended.pod} -c {ended.container}"
        shares_limit = ended.container in _INIT_CONTAINERS_OF.get(container, ())
        remedy = (
            f"it has the limit of the container {container}: raise that limit"
            if shares_limit
            else "raise the limit"
        )
    if ended.reason == "OOMKilled":
        return f"{subject} used more memory than its limit: {remedy}"
    return f"{subject} ended with exit code {ended.code} and no message: see kubectl logs {log}"
