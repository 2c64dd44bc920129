"""Training: one Indexed Job for each attempt. If a rank fails, the whole gang ends and the next attempt resumes."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus
from finetune_operator import names
from finetune_operator.finetunejob.children import ComponentChildren, classify_children, job_condition
from finetune_operator.finetunejob.decide import attempt as attempts
from finetune_operator.finetunejob.decide import checkpoint, track
from finetune_operator.finetunejob.draft import device, mistakes
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import (
    backoff,
    gang,
    health,
    own_code,
    placement,
    pod_state,
    queueing,
    sidecars,
)
from finetune_operator.policy.result import Continue, Outcome, Stop

# The number of earlier attempts whose Jobs, and with them the pods' logs, are kept.
_KEPT_ATTEMPTS = 3


def train(draft: Draft) -> Outcome:
    """Run an attempt to its end; the pass ends until it is complete."""
    if draft.holds(ConditionType.TRAINED):
        name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
        sidecars.release(draft, names.TRAIN, name, gang.CONTAINER)
        return Continue
    if not track.may_train(draft):
        tracked = draft.condition(ConditionType.TRACKED)
        reason, why = ConditionReason.STARTING, "the MLflow run is being created"
        if tracked and tracked.status == "False":
            reason, why = ConditionReason(tracked.reason), tracked.message
        draft.set(ConditionType.TRAINED, False, reason, f"training waits for MLflow: {why}")
        return Stop
    number = draft.status.attempt or 1
    name = names.train_name(draft.ftj.name, number)
    children = classify_children(draft.observed.jobs, draft.observed.pods, names.TRAIN, name)
    child, attempt_pods = children.current_job, children.pods
    if child is None:
        _start(draft, number, children)
        return Stop
    # NB: the pass that created the Job may have ended before it wrote the status.
    _record_start(draft, number)
    nodes = draft.spec.distributed.nodes
    draft.update(nodes=placement.summarize_nodes(attempt_pods, desired=nodes))
    device.record_device(draft, pod_state.alive(attempt_pods))
    checkpoint.record_checkpoint(draft, attempt_pods)
    if sidecars.has_completed(child, attempt_pods, gang.CONTAINER, nodes=nodes):
        _finish(draft, attempt_pods)
        return Continue
    failed = sidecars.find_failure(child, attempt_pods, gang.CONTAINER, draft.now)
    if failed is not None:
        attempts.after_failure(draft, number, attempt_pods, child, failed)
        return Stop
    _follow(draft, number, child, attempt_pods)
    return Stop


def _start(draft: Draft, number: int, children: ComponentChildren) -> None:
    """Create the children of an attempt, after the pods of the previous one have stopped."""
    if not backoff.may_start(draft):
        return
    _record_start(draft, number)
    wrong = "; ".join(mistakes.of_training(draft.spec))
    if wrong:
        # NB: the template may have changed since the job was accepted.
        draft.set(ConditionType.PODS_HEALTHY, False, ConditionReason.POD_TEMPLATE_INVALID, wrong)
        message = f"attempt {number} waits for a correction of spec.pods"
        draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)
        return
    for stale_job in children.stale_jobs:
        draft.remove(stale_job)
    if children.stale_jobs or children.stale_pods:
        message = f"attempt {number} starts when {pod_state.describe_stale(children)} of the previous one has stopped"
        draft.set(ConditionType.TRAINED, False, ConditionReason.RESTARTING, message)
        draft.requeue_after(draft.settings.poll_seconds)
        return
    _delete_old_jobs(draft, number, children)
    health.forget_refusal(draft)
    draft.apply += [gang.build_service(draft), gang.build_recipe(draft), gang.build_job(draft, number)]
    nodes = draft.spec.distributed.nodes
    draft.update(nodes=placement.summarize_nodes([], desired=nodes))
    starting = "1 pod is starting" if nodes == 1 else f"{nodes} pods are starting"
    message = f"attempt {number}: {starting}{attempts.cause_of(draft, number - 1)}"
    draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)


def _record_start(draft: Draft, number: int) -> None:
    draft.record_start()
    draft.update(attempt=number, restarts=draft.status.restarts or 0)


def _delete_old_jobs(draft: Draft, number: int, children: ComponentChildren) -> None:
    """Delete the Jobs of older attempts, since preemptions are not limited in number."""
    kept_names = {names.train_name(draft.ftj.name, number - back) for back in range(_KEPT_ATTEMPTS + 1)}
    for child in children.ended_jobs:
        if child["metadata"]["name"] not in kept_names:
            draft.remove(child)


def _follow(draft: Draft, number: int, child: Json, attempt_pods: list[Json]) -> None:
    name, nodes = child["metadata"]["name"], draft.spec.distributed.nodes
    alive = pod_state.alive(attempt_pods)
    draft.requeue_after(draft.settings.poll_seconds)
    if queueing.is_queued(child) and not alive:
        queueing.report_queue(draft, ConditionType.TRAINED, f"attempt {number}", child)
        return
    health.report_health(draft, alive, name, desired=nodes)
    ready = draft.status.nodes.ready if draft.status.nodes else 0
    if ready == nodes:
        reason = ConditionReason.TRAINING
        gang_size = "1 pod" if nodes == 1 else f"{nodes} pods"
        message = f"attempt {number} runs on {gang_size}; kubectl logs job/{name} shows its progress"
    else:
        reason = ConditionReason.STARTING
        earlier = attempts.cause_of(draft, number - 1)
        message = (
            f"attempt {number}: {ready} of {nodes} pods are ready{health.describe_image_pull(draft, alive)}"
            f"{own_code.describe_step(alive)}{earlier}"
        )
    if job_condition(child, "FailureTarget") and alive:
        # NB: the pods of a lost node do not end, and neither does the attempt.
        message = f"attempt {number} has failed and ends when {pod_state.describe_pods(alive)} has stopped"
    draft.set(ConditionType.TRAINED, False, reason, message)


def _finish(draft: Draft, attempt_pods: list[Json]) -> None:
    results = [
        ended.message.train
        for ended in pod_state.exits(attempt_pods, gang.CONTAINER)
        if ended.message and ended.message.train
    ]
    if results:
        result = results[0]
        before = draft.status.model or ModelStatus()
        losses = {
            "base_eval_loss": result.base_eval_loss,
            "eval_loss": result.eval_loss,
            "perplexity": result.perplexity,
        }
        rounded = {key: track.round_finite(value, 4) for key, value in losses.items()}
        finite = {key: value for key, value in rounded.items() if value is not None}
        if finite:
            draft.update(model=before.model_copy(update=finite))
        track.record_goodput(draft, result.goodput)
        _complete_progress(draft, result.step)
    _record_folder(draft)
    draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "every pod completed")
    draft.set(
        ConditionType.TRAINED, True, ConditionReason.TRAINED, f"attempt {draft.status.attempt} completed"
    )


def _record_folder(draft: Draft) -> None:
    """The folder of the model: the built-in loop ends well only when the model is in it."""
    output = draft.spec.output
    if output is None:
        return
    before = draft.status.model or ModelStatus()
    summary = output.uri if draft.spec.register_ is None else before.summary
    draft.update(model=before.model_copy(update={"folder": output.uri, "summary": summary}))


def _complete_progress(draft: Draft, step: int) -> None:
    progress = draft.status.progress
    if progress and step >= progress.step:
        finished = {
            "step": step,
            "max_steps": step,
            "percent": 100,
            "summary": "100%",
            "seconds_remaining": 0,
        }
        draft.update(progress=progress.model_copy(update=finished))
