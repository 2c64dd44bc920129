"""The state of a step of a job and its cause, classified once from its batch Job and the Job's pods.

Preparation, training and evaluation classify their step, then act on the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.status import LastFailure
from finetune_operator.batch.blockage import Blockage
from finetune_operator.batch.state import describe_pod, describe_pods, is_alive
from finetune_operator.finetunejob.children import (
    ComponentChildren,
    classify_children,
    find_deletion_request_time,
    find_loss_time,
    is_lost,
    is_suspended,
    was_stopped_by_suspension,
)
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import health, pod_state, queueing, sidecars


@dataclass(frozen=True)
class Step:
    """A step of a job that runs as one batch Job.

    Attributes:
        component: the label of its Jobs and pods.
        job_name: the name of its current Job.
        container: the name of the main container.
        nodes: the number of its pods.
        executors: the number of pods that the main container creates.
        attempt: the number of the attempt, whose pods fail together; 0 for a Job that replaces failed pods.
        last_end: when the pods of the attempt last ended, as the status records it: Kueue may stop and resume a Job. Pods that were stopped by
            then no longer count. None if there is no record.
        ranks_per_node: the processes of each pod.
        use_less: how the main container can use less memory, as a part of a sentence; empty if unknown.
    """

    component: str
    job_name: str
    container: str
    nodes: int = 1
    executors: int = 0
    attempt: int = 0
    last_end: datetime | None = None
    ranks_per_node: int = 1
    use_less: str = ""

    @property
    def is_gang(self) -> bool:
        """Whether the pods fail together, as in training. The Jobs of other steps replace a failed pod."""
        return self.attempt > 0


@dataclass(frozen=True)
class Absent:
    """The Job does not exist. Earlier Jobs and their pods may still be stopping, or be lost."""

    children: ComponentChildren

    @property
    def has_stale_children(self) -> bool:
        """Whether earlier Jobs or their pods have not stopped."""
        return bool(self.children.stale_jobs or self.children.stale_pods)


@dataclass(frozen=True)
class _WithJob:
    """The Job exists.

    Attributes:
        job: the Job.
        pods: its pods, sorted by completion index.
    """

    job: Json
    pods: list[Json]


@dataclass(frozen=True)
class Queued(_WithJob):
    """The Job is suspended and has no pods: it waits in a queue."""


@dataclass(frozen=True)
class Stopping(_WithJob):
    """The Job was suspended while it ran, and some of its pods have not stopped. The Job may have been resumed since.

    Attributes:
        stopping_pods: the pods that have not stopped.
    """

    stopping_pods: list[Json]


@dataclass(frozen=True)
class _AtWork(_WithJob):
    """The Job has not ended.

    Attributes:
        alive: the pods that have not ended, including those that the main container created.
        ready: how many of `pods` are ready.
        blockage: what keeps a pod from running; None if nothing is known.
        failure: how the last pod that the Job replaced failed; None if it has replaced none, and for a gang.
    """

    alive: list[Json]
    ready: int
    blockage: Blockage | None
    failure: LastFailure | None


@dataclass(frozen=True)
class Starting(_AtWork):
    """Some pods are not ready yet, and no blockage is known."""


@dataclass(frozen=True)
class Blocked(_AtWork):
    """Some pods cannot become ready because of `blockage`, until a node is added or somebody corrects something."""


@dataclass(frozen=True)
class Running(_AtWork):
    """All pods are ready. An executor may have a `blockage`."""


@dataclass(frozen=True)
class Succeeded(_WithJob):
    """The main containers have succeeded.

    Attributes:
        ends: how they ended, the earliest first.
    """

    ends: list[pod_state.Exit]


@dataclass(frozen=True)
class ResultLost(_WithJob):
    """The Job is complete, but its result is lost: the pods that would report it no longer exist."""


@dataclass(frozen=True)
class NodeLost(_WithJob):
    """A pod is lost with its node, so the Job cannot end.

    Attributes:
        failure: names the pod and its node.
    """

    failure: LastFailure


@dataclass(frozen=True)
class Failed(_WithJob):
    """The Job has failed, or its main container has failed while another container or a lost pod keeps the Job from ending.

    Attributes:
        ends: how the main containers ended, the earliest first.
        condition: the condition Failed of the Job; empty if the Job has not failed.
        failure: the failure that ended the Job; None if the pods that would report it no longer exist.
    """

    ends: list[pod_state.Exit]
    condition: Json
    failure: LastFailure | None


AtWork = Starting | Blocked | Running
WithJob = Queued | Stopping | AtWork | Succeeded | ResultLost | NodeLost | Failed
StepState = Absent | WithJob


def classify_step(draft: Draft, step: Step) -> StepState:
    """The state of a step, from what was observed. The end of the Job comes first, then the loss of a pod, then what the Job waits for."""
    observed = draft.observed
    step_pods = [pod for pod in observed.pods if not _ended_before(pod, step.last_end)]
    children = classify_children(observed.jobs, step_pods, step.component, step.job_name, draft.now)
    job, pods = children.current_job, children.pods
    if job is None:
        return Absent(children)
    ends = pod_state.exits(pods, step.container)
    if sidecars.has_completed(job, pods, step.container, nodes=step.nodes):
        succeeded = [ended for ended in ends if ended.code == 0]
        return Succeeded(job, pods, succeeded) if succeeded else ResultLost(job, pods)
    condition = sidecars.find_failure(job, pods, step.container, draft.now)
    stopping_pods = _find_stopping_pods(job, pods)
    # NB: the condition is empty if only a container has failed. Such a failure counts only if no suspension stops the pods.
    if condition is not None and (condition or not stopping_pods):
        return Failed(job, pods, ends, condition, _find_failure(pods, step))
    loss = pod_state.find_loss(pods, draft.now, attempt=step.attempt, ranks_per_node=step.ranks_per_node)
    if loss:
        # NB: a gang that has crashed would crash again elsewhere, so it has failed. The Jobs of other steps retry a crash themselves.
        lost_pods = [pod for pod in pods if is_lost(pod, draft.now)]
        has_crashed = step.is_gang and not stopping_pods and pod_state.has_crashed(ends, lost_pods)
        return (
            Failed(job, pods, ends, condition={}, failure=_find_failure(pods, step))
            if has_crashed
            else NodeLost(job, pods, loss)
        )
    if stopping_pods:
        return Stopping(job, pods, stopping_pods)
    return Queued(job, pods) if is_suspended(job) else _classify_pods(draft, step, job, pods)


def _ended_before(pod: Json, last_end: datetime | None) -> bool:
    """Whether a pod has ended, and was stopped no later than the last recorded end of its attempt."""
    request_time = find_deletion_request_time(pod)
    return (
        last_end is not None and request_time is not None and request_time <= last_end and not is_alive(pod)
    )


def _find_stopping_pods(job: Json, pods: list[Json]) -> list[Json]:
    """The pods that have not stopped since their Job was suspended."""
    return [pod for pod in pod_state.alive(pods) if is_suspended(job) or was_stopped_by_suspension(pod, job)]


def _classify_pods(draft: Draft, step: Step, job: Json, pods: list[Json]) -> AtWork:
    executors = draft.observed.executors if step.executors else ()
    alive, ready = pod_state.alive([*pods, *executors]), pod_state.count_ready(pods)
    blockage = health.find_blockage(draft, alive, step.job_name, desired=step.nodes + step.executors)
    failure = None if step.is_gang else _find_failure(pods, step)
    if ready >= step.nodes:
        return Running(job, pods, alive, ready, blockage=blockage, failure=failure)
    if blockage:
        return Blocked(job, pods, alive, ready, blockage=blockage, failure=failure)
    return Starting(job, pods, alive, ready, blockage=None, failure=failure)


def _find_failure(pods: list[Json], step: Step) -> LastFailure | None:
    if step.is_gang:
        return pod_state.first_failure(
            pods,
            step.container,
            step.attempt,
            ranks_per_node=step.ranks_per_node,
            use_less=step.use_less,
        )
    return pod_state.last_failure(pods, step.container, attempt=0, use_less=step.use_less)


def has_completed(draft: Draft, step: Step) -> bool:
    """Whether a step is complete, with or without a result that can still be read."""
    return isinstance(classify_step(draft, step), Succeeded | ResultLost)


def clear_name(draft: Draft, state: Absent) -> str | None:
    """Make the name of the Job available again, for a step that always uses the same name.

    A Job that is being deleted keeps the name as long as its lost pods exist, so it is deleted again without waiting for them. Returns what
    must disappear before the new Job can be created, to follow "waits for": Jobs or pods; None if the new Job can be created.
    """
    for job in state.children.abandoned_jobs:
        draft.free_name(job)
    if state.has_stale_children:
        return pod_state.describe_stale(state.children)
    names_in_use = [job["metadata"]["name"] for job in state.children.abandoned_jobs]
    return f"Job {names_in_use[0]} to be deleted" if names_in_use else None


def report_pods(draft: Draft, state: AtWork) -> None:
    """Report what keeps pods from running and how the last replaced pod failed, and requeue the job for when a pod counts as lost."""
    health.report_blockage(draft, state.alive, state.blockage)
    _requeue_at_loss(draft, state.alive)
    if state.failure:
        draft.update(last_failure=state.failure)


def describe_stop(draft: Draft, state: Stopping) -> str:
    """Describe which pods a step waits for, to follow the name of the step, and requeue the job for when these pods count as lost."""
    _requeue_at_loss(draft, state.stopping_pods)
    draft.poll()
    _, cause = queueing.explain_suspension(draft, state.job)
    return f"waits for {describe_pods(state.stopping_pods)} to stop: {cause}"


def _requeue_at_loss(draft: Draft, alive: list[Json]) -> None:
    """Requeue the job for the time at which the next pod that is being deleted counts as lost."""
    for pod in alive:
        loss_time = find_loss_time(pod)
        if loss_time and loss_time > draft.now:
            draft.requeue_after((loss_time - draft.now).total_seconds())


def explain_failure(state: Failed, step: Step, reason: ConditionReason) -> tuple[ConditionReason, str]:
    """The reason for the failure of a step other than training, and the end of a sentence about it.

    Args:
        reason: the reason for exit codes that have no reason of their own.
    """
    failure = state.failure
    if failure is None:
        return reason, f": {state.condition.get('message', '')}"
    exit_reason = pod_state.REASON_OF_EXIT.get(failure.exit_code or 0, reason)
    where = describe_pod(failure.pod or "", failure.node)
    no_retry = sidecars.explain_no_retry(state.pods, step.container)
    return exit_reason, f" in {where}: {failure.message}{no_retry}"
