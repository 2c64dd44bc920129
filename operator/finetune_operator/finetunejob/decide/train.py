"""Training: one Indexed Job for each attempt. If a rank fails, all pods of the attempt (the gang) end, and the next attempt resumes."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus
from finetune_operator import names
from finetune_operator.batch.state import describe_pods, job_condition
from finetune_operator.finetunejob.children import is_suspended
from finetune_operator.finetunejob.decide import attempt as attempts
from finetune_operator.finetunejob.decide import checkpoint, eviction, progress, track
from finetune_operator.finetunejob.draft import device, mistakes
from finetune_operator.finetunejob.draft.companions import restore_companions
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import (
    backoff,
    gang,
    health,
    own_code,
    placement,
    pod_state,
    probing,
    queueing,
    sidecars,
    step_state,
)
from finetune_operator.policy.result import Continue, Outcome, Stop

# The number of earlier attempts whose Jobs, and with them the pods' logs, are kept.
_KEPT_ATTEMPTS = 3


def train(draft: Draft) -> Outcome:
    """Run attempts. Until one is complete, each pass ends here."""
    if draft.holds(ConditionType.TRAINED):
        name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
        sidecars.release(draft, names.TRAIN, name, gang.CONTAINER)
        return Continue
    if not track.may_train(draft):
        track.report_wait(draft)
        return Stop
    number = draft.status.attempt or 1
    state = step_state.classify_step(draft, gang.build_step(draft, number))
    if isinstance(state, step_state.Absent):
        if attempts.was_deleted(draft, number):
            attempts.after_deletion(draft, number, state)
        else:
            _start(draft, number, state)
        return Stop
    # NB: the pass that created the Job may have ended before it wrote the status, so this pass records the start too.
    _record_start(draft, number)
    # All pods of a queued Job have stopped.
    placed_pods = [] if isinstance(state, step_state.Queued) else state.pods
    draft.update(nodes=placement.summarize_nodes(placed_pods, desired=draft.spec.distributed.nodes))
    device.record_device(draft, pod_state.alive(state.pods))
    has_ended = not isinstance(state, step_state.Queued | step_state.Stopping | step_state.AtWork)
    if has_ended:
        # Kueue may have stopped and resumed the Job before it ended, and no pass has seen that. `_act_on` records the other evictions.
        eviction.record_missed_eviction(draft, number, state.job)
    checkpoint.record_checkpoint(draft, state.pods)
    return _act_on(draft, number, state)


def _act_on(draft: Draft, number: int, state: step_state.WithJob) -> Outcome:
    """Act on the state of the Job of an attempt. The pass continues only if the training is complete."""
    match state:
        # ResultLost: the training is complete as well, and only the report of rank 0 is missing.
        case step_state.Succeeded() | step_state.ResultLost():
            _finish(draft, state)
            return Continue
        case step_state.Failed():
            attempts.after_failure(draft, number, state)
        case step_state.NodeLost():
            attempts.after_node_loss(draft, number, state)
        case step_state.Stopping():
            # NB: until all pods have stopped, the condition keeps its reason.
            before = draft.condition(ConditionType.TRAINED)
            reason = ConditionReason(before.reason) if before else ConditionReason.STARTING
            message = f"attempt {number} {step_state.describe_stop(draft, state)}"
            draft.set(ConditionType.TRAINED, False, reason, message)
        case step_state.Queued() | step_state.Starting() | step_state.Blocked() | step_state.Running():
            _restore_companions(draft)
            draft.poll()
            if not eviction.record_eviction(draft, number, state.job):
                _report(draft, number, state)
    return Stop


def _report(draft: Draft, number: int, state: step_state.Queued | step_state.AtWork) -> None:
    """Report why an attempt waits in its queue or, after its Job was started, how far it is."""
    if isinstance(state, step_state.Queued):
        _report_queue(draft, number, state.job)
        return
    step_state.report_pods(draft, state)
    probing.complete_gang(draft, state.job, state.pods, state.blockage)
    _follow(draft, number, state)


def _report_queue(draft: Draft, number: int, job: Json) -> None:
    after = (
        f"; its pods were stopped, and it {checkpoint.describe_start(draft)}"
        if eviction.has_been_evicted(draft, number)
        else attempts.cause_of(draft, number - 1)
    )
    queueing.report_queue(draft, ConditionType.TRAINED, f"attempt {number}", job, after=after)


def _start(draft: Draft, number: int, state: step_state.Absent) -> None:
    """Create the children of an attempt, after the pods of the previous one have stopped or are lost."""
    if not backoff.may_start(draft):
        return
    _record_start(draft, number)
    pod_mistakes = "; ".join(mistakes.of_training(draft.spec))
    if pod_mistakes:
        # NB: the template may have changed since the job was accepted.
        draft.set(ConditionType.PODS_HEALTHY, False, ConditionReason.POD_TEMPLATE_INVALID, pod_mistakes)
        message = f"attempt {number} waits for a correction of spec.pods"
        draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)
        return
    for stale_job in state.children.stale_jobs:
        draft.remove(stale_job)
    for abandoned_job in state.children.abandoned_jobs:
        # NB: an abandoned Job stays as long as its lost pods, and a later FineTuneJob of this name needs the Job's name.
        draft.free_name(abandoned_job)
    if state.has_stale_children:
        stale = pod_state.describe_stale(state.children, " of the previous attempt")
        message = f"attempt {number} waits for {stale}"
        draft.set(ConditionType.TRAINED, False, ConditionReason.RESTARTING, message)
        draft.requeue_after(draft.settings.poll_seconds)
        return
    _delete_old_jobs(draft, number, state.children.ended_jobs)
    health.forget_refusal(draft)
    job = gang.build_job(draft, number)
    draft.apply += [*gang.build_companions(draft), job]
    nodes = draft.spec.distributed.nodes
    draft.update(nodes=placement.summarize_nodes([], desired=nodes))
    if is_suspended(job):
        _report_queue(draft, number, job)
        return
    starting = "1 pod is starting" if nodes == 1 else f"{nodes} pods are starting"
    if probing.is_probing(job):
        starting = _describe_probe(nodes)
    message = f"attempt {number}: {starting}{attempts.cause_of(draft, number - 1)}"
    draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)


def _record_start(draft: Draft, number: int) -> None:
    draft.record_start()
    draft.update(attempt=number, restarts=draft.status.restarts or 0)


def _delete_old_jobs(draft: Draft, number: int, ended_jobs: list[Json]) -> None:
    """Keep only the latest of the ended Jobs: a job may be preempted any number of times, and each preemption leaves a Job."""
    kept_names = {names.train_name(draft.ftj.name, number - back) for back in range(1, _KEPT_ATTEMPTS + 1)}
    for job in ended_jobs:
        if job["metadata"]["name"] not in kept_names:
            draft.remove(job)


def _restore_companions(draft: Draft) -> None:
    restore_companions(draft, gang.companions(draft), lambda: gang.build_companions(draft))


def _follow(draft: Draft, number: int, state: step_state.AtWork) -> None:
    """Report the progress of an attempt whose Job has not ended."""
    name, nodes = state.job["metadata"]["name"], draft.spec.distributed.nodes
    if isinstance(state, step_state.Running):
        reason = ConditionReason.TRAINING
        gang_size = "1 pod" if nodes == 1 else f"{nodes} pods"
        message = f"attempt {number} runs on {gang_size}; kubectl logs job/{name} shows its progress"
    else:
        reason = ConditionReason.STARTING
        earlier = attempts.cause_of(draft, number - 1)
        pods = (
            _describe_probe(nodes)
            if probing.is_probing(state.job)
            else f"{state.ready} of {nodes} pods are ready"
        )
        message = (
            f"attempt {number}: {pods}{health.describe_image_pull(draft, state.alive)}"
            f"{own_code.describe_step(state.alive)}{earlier}"
        )
    exits = pod_state.exits(state.pods, gang.CONTAINER)
    # FailureTarget: the Job controller has found the failure, and stops the other pods.
    has_failed = any(pod_exit.code for pod_exit in exits) or bool(job_condition(state.job, "FailureTarget"))
    if has_failed:
        # NB: the attempt ends when all pods have stopped, or a pod counts as lost. Until then, the condition keeps its reason.
        before = draft.condition(ConditionType.TRAINED)
        if before:
            reason = ConditionReason(before.reason)
        message = f"attempt {number} has failed{_describe_rest(state.alive)}"
    draft.set(ConditionType.TRAINED, False, reason, message)


def _describe_probe(nodes: int) -> str:
    return f"1 of {nodes} pods starts first, and the others follow when the command of the first pod runs"


def _describe_rest(alive: list[Json]) -> str:
    """The pods that a failed attempt waits for, as the end of a sentence."""
    return f" and waits for {describe_pods(alive)} to stop" if alive else ""


def _finish(draft: Draft, state: step_state.Succeeded | step_state.ResultLost) -> None:
    """Record the result that rank 0 reported, if it is not lost, and the end of the training."""
    exits = state.ends if isinstance(state, step_state.Succeeded) else []
    # Empty, or the result of rank 0: no other rank reports one.
    results = [pod_exit.message.train for pod_exit in exits if pod_exit.message and pod_exit.message.train]
    if results:
        result = results[0]
        before = draft.status.model or ModelStatus()
        losses = {
            "base_eval_loss": result.base_eval_loss,
            "eval_loss": result.eval_loss,
            "perplexity": result.perplexity,
        }
        rounded = {key: progress.round_finite(value, progress.LOSS_DIGITS) for key, value in losses.items()}
        finite = {key: value for key, value in rounded.items() if value is not None}
        if finite:
            draft.update(model=before.model_copy(update=finite))
        progress.record_goodput(draft, result.goodput, result.productive_seconds)
        progress.complete_progress(draft, result.step)
    _record_folder(draft)
    draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "every pod completed")
    draft.set(
        ConditionType.TRAINED, True, ConditionReason.TRAINED, f"attempt {draft.status.attempt} completed"
    )


def _record_folder(draft: Draft) -> None:
    """Record the folder of the model: the built-in loop succeeds only after it has saved the model there."""
    output = draft.spec.output
    if output is None:
        return
    before = draft.status.model or ModelStatus()
    # With spec.register, the summary names the registered version instead.
    summary = output.uri if draft.spec.register_ is None else before.summary
    draft.update(model=before.model_copy(update={"folder": output.uri, "summary": summary}))
