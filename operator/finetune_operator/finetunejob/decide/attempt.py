"""What follows a failed attempt: a restart, or the end of the job."""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import AttemptCause, LastFailure
from finetune_operator import names
from finetune_operator.batch.state import describe_pod
from finetune_operator.finetunejob.children import pods_of_job
from finetune_operator.finetunejob.decide import attempt_history, checkpoint
from finetune_operator.finetunejob.decide.failure_cause import (
    CAUSES,
    Fatal,
    NotStarted,
    OutOfMemory,
    Preempted,
    Retryable,
    Unexplained,
    classify_failure,
)
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import SOON_SECONDS
from finetune_operator.finetunejob.pods import (
    backoff,
    memory_reduction,
    own_code,
    pod_state,
    probing,
)
from finetune_operator.finetunejob.pods.step_state import Absent, Failed, NodeLost
from finetune_operator.text import format_duration, shorten

# Characters of the previous attempt's error in the message of the next attempt.
_MAX_CAUSE_CHARS = 200
_POD_DELETED = "PodDeleted"
_JOB_DELETED = "JobDeleted"


def after_failure(draft: Draft, number: int, state: Failed) -> None:
    """Record the failure, then restart the gang or fail the job."""
    policy = draft.spec.run_policy
    failure = state.failure or _explain_lost_pods(number, state.condition)
    deleted_pod = _find_deleted_pod(failure, state.ends)
    init_reason = own_code.find_failed_step(failure, state.ends, draft.spec.trainer)
    cause = classify_failure(draft, failure, init_reason, state)
    run_seconds = backoff.run_seconds(state.job, draft.now)
    attempt = _record_failure(
        draft,
        failure.model_copy(update={"reason": _failure_reason(failure, deleted_pod, init_reason)}),
        CAUSES[type(cause)],
        # NB: pods that wait for a server train nothing, however long they run.
        seconds=0.0 if isinstance(cause, NotStarted) else run_seconds,
    )
    sentence = _describe_failure(failure, deleted_pod)
    match cause:
        case Preempted():
            backoff.record_delay(draft, attempt)
            _restart_uncounted(draft, number, _describe_interruption(draft, number, failure, deleted_pod))
        case Unexplained():
            backoff.record_delay(draft, attempt)
            why = f"attempt {number} may have been preempted and does not count as a restart; {sentence}"
            _restart_uncounted(draft, number, why)
        case NotStarted():
            backoff.record_delay(draft, attempt)
            why = f"attempt {number} failed to start and does not count as a restart; {sentence}"
            _restart_uncounted(draft, number, why)
        case Fatal(fatal_reason):
            _fail(draft, fatal_reason, sentence)
        case OutOfMemory(reduced_memory) if reduced_memory is not None:
            # Without delay or limit: each such attempt uses less memory than the one before, until no setting is left.
            draft.update(reduced_memory=reduced_memory)
            settings = memory_reduction.describe(reduced_memory)
            why = f"{memory_reduction.describe_lack(number, failure)}, and the next one has {settings}"
            restart(draft, number + 1, counted=False, why=f"{why}; {_describe_end(failure)}")
        case OutOfMemory():
            why = f"{memory_reduction.describe_lack(number, failure)}, and no setting is left that uses less"
            remedy = memory_reduction.describe_remedy(draft)
            _fail(draft, ConditionReason.OUT_OF_MEMORY, f"{why}; {_describe_end(failure)}; {remedy}")
        # The rendezvous may have timed out while the other pods were still starting.
        case Retryable() if probing.has_begun_with_one_pod(state.job):
            backoff.record_delay(draft, attempt)
            why = f"attempt {number} began with one pod and does not count as a restart; {sentence}"
            _restart_uncounted(draft, number, why)
        case Retryable() if (draft.status.restarts or 0) < policy.max_restarts:
            restart(draft, number + 1, counted=True, why=f"attempt {number} failed; {sentence}")
        case Retryable():
            why = f"attempt {number} failed and runPolicy.maxRestarts = {policy.max_restarts} is reached"
            _fail(
                draft, ConditionReason.MAX_RESTARTS_REACHED, f"{why}; {sentence}{_describe_next_job(draft)}"
            )


def after_node_loss(draft: Draft, number: int, state: NodeLost) -> None:
    """Record the lost pod, stop the other pods, and restart the gang elsewhere."""
    draft.remove(state.job)
    _restart_elsewhere(draft, number, state.failure, seconds=backoff.run_seconds(state.job, draft.now))


def _restart_elsewhere(draft: Draft, number: int, loss: LastFailure, *, seconds: float) -> None:
    """Record the loss of a node, and start another attempt that does not count as a restart."""
    backoff.record_delay(draft, _record_failure(draft, loss, "NodeLost", seconds=seconds))
    why = f"attempt {number} lost a node and does not count as a restart; {loss.message}"
    _restart_uncounted(draft, number, why)


def was_deleted(draft: Draft, number: int) -> bool:
    """Whether the absent Job of an attempt was deleted, rather than never created: the status names the attempt if its Job existed."""
    return draft.status.jobs is not None and draft.status.jobs.train_attempt == number


def after_deletion(draft: Draft, number: int, state: Absent) -> None:
    """Restart the gang of an attempt whose Job was deleted before its end was recorded.

    Somebody deleted the Job; or the operator did, after a node was lost, and could not write the status.
    """
    job_name = names.train_name(draft.ftj.name, number)
    abandoned_jobs = state.children.abandoned_jobs
    job = next((job for job in abandoned_jobs if job["metadata"]["name"] == job_name), None)
    pods = pods_of_job(draft.observed.pods, job) if job else []
    loss = pod_state.find_loss(pods, draft.now, attempt=number)
    if job and loss:
        _restart_elsewhere(draft, number, loss, seconds=backoff.run_seconds(job, draft.now))
        return
    deletion = f"Job {job_name} was deleted before its end was recorded"
    failure = LastFailure(reason=_JOB_DELETED, message=deletion, attempt=number)
    backoff.record_delay(draft, _record_failure(draft, failure, "JobDeleted", seconds=0.0))
    _restart_uncounted(draft, number, f"{deletion} and does not count as a restart")


def _record_failure(
    draft: Draft, failure: LastFailure, cause: AttemptCause, *, seconds: float
) -> backoff.Attempt:
    """Record a failure and the steps reached by then; return the progress since the previous failure."""
    status = draft.status
    before = status.last_failure or LastFailure()
    step = status.checkpoint.step if status.checkpoint else None
    # NB: not the last reported step: an attempt that starts from the beginning repeats steps of an earlier attempt.
    furthest_step = max(status.progress.step if status.progress else 0, before.step or 0) or None
    recorded_failure = failure.model_copy(update={"checkpoint_step": step, "step": furthest_step})
    draft.update(last_failure=recorded_failure)
    attempt_history.record_end(draft, recorded_failure, cause)
    attempt = backoff.Attempt(
        seconds=seconds,
        step=step,
        step_before=before.checkpoint_step,
        reported_step=furthest_step,
        reported_step_before=before.step,
    )
    if attempt.has_progressed:
        draft.update(no_progress_since=None)
    return attempt


def _restart_uncounted(draft: Draft, number: int, why: str) -> None:
    """Start another attempt without counting it, or fail the job if it has made no progress for too long."""
    window = draft.spec.run_policy.restart_window_seconds
    idle_seconds = backoff.find_idle_seconds(draft)
    if idle_seconds < window:
        restart(draft, number + 1, counted=False, why=why)
        return
    message = (
        f"{why}; the training has made no progress for {format_duration(int(idle_seconds))}, longer than "
        f"runPolicy.restartWindowSeconds = {window}: remove the cause, and create a FineTuneJob with another name"
    )
    _fail(draft, ConditionReason.NO_PROGRESS, message)


def _fail(draft: Draft, reason: ConditionReason, message: str) -> None:
    draft.set(ConditionType.TRAINED, False, reason, message)
    draft.fail(reason, message)


def _describe_next_job(draft: Draft) -> str:
    """How to continue after a failed job, as the end of a sentence."""
    continuation = ", with checkpoint.resumeFrom to continue this run" if draft.status.checkpoint else ""
    return f"; correct the cause, and create a FineTuneJob with another name{continuation}"


def _explain_lost_pods(number: int, condition: Json) -> LastFailure:
    """The failure of an attempt whose pods no longer exist, from the condition Failed of its Job."""
    return LastFailure(
        reason=condition.get("reason"),
        message=f"the pods that could explain the failure no longer exist: {condition.get('message', '')}",
        attempt=number,
    )


def _failure_reason(
    failure: LastFailure, deleted_pod: pod_state.Exit | None, init_reason: ConditionReason | None
) -> str | None:
    """The reason under which the status records a failure. `init_reason` replaces only the kubelet's reason UNEXPLAINED."""
    if deleted_pod:
        return _POD_DELETED
    if init_reason and failure.reason == pod_state.UNEXPLAINED:
        return init_reason.value
    return failure.reason


def _find_deleted_pod(failure: LastFailure, ends: list[pod_state.Exit]) -> pod_state.Exit | None:
    """The pod whose deletion caused the failure; None if the failure has another cause."""
    deleted_pod = pod_state.find_deleted_pod(ends)
    # NB: when a pod is deleted, the ranks in the other pods stop together, all with EXIT_PREEMPTED.
    is_cause = deleted_pod is not None and (
        failure.pod == deleted_pod.pod or failure.exit_code == contract.EXIT_PREEMPTED
    )
    return deleted_pod if is_cause else None


def _describe_interruption(
    draft: Draft, number: int, failure: LastFailure, deleted_pod: pod_state.Exit | None
) -> str:
    """Why a preempted attempt ended: the pod that was preempted, or that somebody deleted."""
    # NB: the next attempt has a delay, until `restart_time`, only if this attempt made no progress.
    progress = _describe_missing_progress(draft) if draft.status.restart_time else ""
    if deleted_pod:
        return f"attempt {number} was stopped{progress}: {describe_pod(deleted_pod.pod, deleted_pod.node)} was deleted"
    on = f": {describe_pod(failure.pod, failure.node)}" if failure.pod else ""
    return f"attempt {number} was preempted{progress}{on}"


def _describe_missing_progress(draft: Draft) -> str:
    """Why an attempt made no progress, as a part of a sentence."""
    if draft.spec.checkpoint is None:
        return " soon after it started"
    return " before it had a newer checkpoint" if draft.status.checkpoint else " before it had a checkpoint"


def _describe_failure(failure: LastFailure, deleted_pod: pod_state.Exit | None) -> str:
    """The failure with its pod, as a sentence."""
    if not failure.pod:
        return failure.message or ""
    after = " after it was deleted" if deleted_pod else ""
    return f"{_describe_end(failure)}{after}: {_find_last_line(failure)}"


def _describe_end(failure: LastFailure) -> str:
    """The pod of a failure with its exit code, as a sentence."""
    where = describe_pod(failure.pod, failure.node) if failure.pod else "a pod"
    return f"{where} ended with exit code {failure.exit_code}"


def _find_last_line(failure: LastFailure) -> str:
    """The last line of a failure's message, which names the error, as in a traceback. The status has all lines."""
    lines = (failure.message or "").strip().splitlines()
    return lines[-1] if lines else ""


def cause_of(draft: Draft, number: int) -> str:
    """Why an attempt failed, as the end of a sentence; empty unless the last recorded failure is of this attempt."""
    failure = draft.status.last_failure
    # NB: the failures of the preparation and of the evaluation have attempt 0.
    if failure is None or failure.attempt != number or not number:
        return ""
    how = f"ended with exit code {failure.exit_code}" if failure.exit_code is not None else "failed"
    why = _find_last_line(failure) or failure.reason
    suffix = f": {shorten(why, _MAX_CAUSE_CHARS)}" if why else ""
    return f"; attempt {number} {how}{suffix}"


def restart(draft: Draft, number: int, *, counted: bool, why: str) -> None:
    """Start another attempt.

    Args:
        number: number of the new attempt.
        counted: whether it counts against runPolicy.maxRestarts.
        why: the cause, as the beginning of a sentence.
    """
    restart_time = draft.status.restart_time
    draft.update(attempt=number)
    if counted:
        draft.update(restarts=(draft.status.restarts or 0) + 1, idle_restarts=None)
    when = f"at {restart_time:%H:%M:%S} UTC, " if restart_time else ""
    draft.set(
        ConditionType.TRAINED,
        False,
        ConditionReason.RESTARTING,
        f"{why}; {when}attempt {number} {checkpoint.describe_start(draft)}",
    )
    draft.requeue_after((restart_time - draft.now).total_seconds() if restart_time else SOON_SECONDS)
