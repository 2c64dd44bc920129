"""A Job that waits in a queue of Kueue: which queue, and why it is not admitted."""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.batch import default_requests
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import QueueState
from finetune_operator.template_merge import merge

JOB_SUSPENDED = "JobSuspended"
"""The reason for the suspension of a running Job that Kueue has not explained."""
# The reasons of a condition while its Job waits in a queue.
_REASONS = (ConditionReason.QUEUED, ConditionReason.QUEUE_INADMISSIBLE)
# Kueue's reasons for a Workload that waits for something other than its turn.
_INADMISSIBLE = {"Inadmissible", "Misconfigured", "Suspended"}
# How long Kueue may take to create a Workload.
_WORKLOAD_TIMEOUT = timedelta(seconds=30)
# The last position that messages show exactly.
_MAX_EXACT_POSITION = 10


def is_from_installation(draft: Draft, queue: str) -> bool:
    """Whether the queue is the chart's default, which a job without a queue gets."""
    resolved = draft.status.resolved
    return resolved is not None and resolved.queue_name == queue


def describe_queue(draft: Draft, queue: str) -> str:
    """Describe a queue, with the source of its name if the job does not name a queue."""
    source = " (defaults.queueName of the chart)" if is_from_installation(draft, queue) else ""
    return f"queue {queue}{source}"


def describe_opt_out(draft: Draft, queue: str) -> str:
    """Return the remedy to run the job without a queue, as a part of a sentence."""
    if is_from_installation(draft, queue):
        return 'set spec.runPolicy.queueName to "", which keeps the job out of the default queue of the chart'
    return "remove spec.runPolicy.queueName"


def enqueue(draft: Draft, job: Json) -> Json:
    """The Job; if the FineTuneJob names a queue, suspended in that queue.

    Kueue starts the Job by removing `suspend`. Applying the Job would suspend it again, so the operator creates it and never applies it.
    """
    queue = draft.spec.run_policy.queue_name
    if not queue:
        return job
    metadata: Json = {"labels": {names.LABEL_QUEUE: queue}}
    return dict(merge(job, {"metadata": metadata, "spec": {"suspend": True}}))


def add_default_requests(draft: Draft, pod: Json, container: str) -> Json:
    """The pod with default requests, unless its Job waits in a queue.

    NB: Kueue does not admit a Job that requests a resource that its ClusterQueue does not cover, and many cover GPUs alone.
    """
    if draft.spec.run_policy.queue_name:
        return pod
    return default_requests.add_default_requests(pod, container)


def report_queue(draft: Draft, kind: ConditionType, what: str, job: Json, *, after: str = "") -> None:
    """Report why a step with a suspended Job waits. The Job has no pods, so no pod is blocked.

    Args:
        after: the end of the sentence; left out unless the Job only waits for its turn.
    """
    if draft.observed.queue_state is None and _is_about_this_wait(draft.condition(kind), what, job):
        # Kueue was not read since the status was written: keep the message.
        return
    reason, message = _explain_wait(draft, what, job)
    draft.set(kind, False, reason, f"{message}{after}" if reason == ConditionReason.QUEUED else message)
    if draft.condition(ConditionType.PODS_HEALTHY):
        draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "no pod is blocked")


def _is_about_this_wait(condition: Condition | None, what: str, job: Json) -> bool:
    """Whether a condition is about the wait of this step in the queue of its Job, not about an earlier attempt or another queue."""
    return (
        condition is not None
        and condition.reason in _REASONS
        and condition.message.startswith(what)
        and f"queue {queue_of(job)}" in condition.message
    )


def _explain_wait(draft: Draft, what: str, job: Json) -> tuple[ConditionReason, str]:
    """The reason and the message for a step whose Job is suspended. `what`: the step, as the subject of a sentence."""
    queue, name = queue_of(job), job["metadata"]["name"]
    if queue is None:
        return ConditionReason.QUEUE_INADMISSIBLE, (
            f"{what} waits, because another client suspended Job {name}, which has no queue: check kubectl get job {name} -o yaml"
        )
    queue_state = draft.observed.queue_state
    check = f"check kubectl get localqueue -n {draft.ftj.namespace}"
    opt_out = describe_opt_out(draft, queue)
    due = _find_creation_time(draft, job) + _WORKLOAD_TIMEOUT
    problem = _find_problem(queue_state, check, opt_out, due=due)
    if problem:
        return ConditionReason.QUEUE_INADMISSIBLE, (
            f"{what} waits, because {describe_queue(draft, queue)} has not admitted Job {name}: {problem}"
        )
    return ConditionReason.QUEUED, f"{what} waits in Kueue's queue {queue}{_describe_progress(queue_state)}"


def explain_suspension(draft: Draft, job: Json) -> tuple[str, str]:
    """The reason why a Job was suspended while it ran, and a sentence about it."""
    name, queue_state = job["metadata"]["name"], draft.observed.queue_state
    if queue_state is None or not queue_state.eviction_reason:
        return JOB_SUSPENDED, f"Job {name} was suspended"
    return queue_state.eviction_reason, f"Kueue evicted Job {name}: {queue_state.eviction_message}"


def _find_problem(queue_state: QueueState | None, check: str, opt_out: str, *, due: datetime) -> str | None:
    """Explain why Kueue does not admit the Job, with the remedy; None if the Job only waits for its turn, or nothing is known.

    Args:
        check: the command that shows the queue, as a part of a sentence.
        opt_out: how to run the job without a queue, as a part of a sentence.
        due: when Kueue has had enough time to create a Workload.
    """
    if queue_state is None:
        return None
    if not queue_state.installed:
        return f"Kueue is not installed in this cluster: install Kueue, or {opt_out}, and suspend and resume the job"
    if not queue_state.workload:
        is_overdue = queue_state.read_at is not None and queue_state.read_at >= due
        return f"Kueue has not created a Workload for the Job: {check}" if is_overdue else None
    return f"{queue_state.message}: {check}" if queue_state.reason in _INADMISSIBLE else None


def _describe_progress(queue_state: QueueState | None) -> str:
    if queue_state is None:
        return ": kubectl get workloads shows why"
    if queue_state.admitted:
        return ", which has admitted it"
    position = (
        f" at position {_round_position(queue_state.position)}" if queue_state.position is not None else ""
    )
    return f"{position}: {queue_state.message}" if queue_state.message else position


def _round_position(position: int) -> str:
    """The position; above _MAX_EXACT_POSITION, rounded down to 10, 20, 50, 100 and so on.

    NB: each admission changes the position of every later job, and each change of the message writes the status.
    """
    if position <= _MAX_EXACT_POSITION:
        return str(position)
    power_of_ten = 10 ** (len(str(position)) - 1)
    round_numbers = [factor * power_of_ten for factor in (1, 2, 5)]
    return f"{max(number for number in round_numbers if number <= position)} or later"


def queue_of(job: Json) -> str | None:
    """The queue that a batch Job names."""
    return (job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE)


def _find_creation_time(draft: Draft, job: Json) -> datetime:
    """When the Job was created; now, for a Job that this pass creates."""
    created = job["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(created) if created else draft.now
