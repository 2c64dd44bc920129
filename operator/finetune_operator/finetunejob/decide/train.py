"""Training: one Indexed Job for each attempt. If a rank fails, the whole gang ends and the next attempt resumes."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus
from finetune_operator import names
from finetune_operator.finetunejob.children import Sorted, job_condition, sort
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
    found = sort(draft.observed.jobs, draft.observed.pods, names.TRAIN, name)
    child, mine = found.current, found.pods
    if child is None:
        _start(draft, number, found)
        return Stop
    # NB: the pass that created the Job may have ended before it wrote the status.
    _note_start(draft, number)
    nodes = draft.spec.distributed.nodes
    draft.update(nodes=placement.nodes(mine, desired=nodes))
    device.note(draft, pod_state.alive(mine))
    checkpoint.note(draft, mine)
    if sidecars.has_completed(child, mine, gang.CONTAINER, nodes=nodes):
        _finish(draft, mine)
        return Continue
    failed = sidecars.find_failure(child, mine, gang.CONTAINER, draft.now)
    if failed is not None:
        attempts.after_failure(draft, number, mine, child, failed)
        return Stop
    _follow(draft, number, child, mine)
    return Stop


def _start(draft: Draft, number: int, found: Sorted) -> None:
    """Create the children of an attempt, after the pods of the previous one have stopped."""
    if not backoff.may_start(draft):
        return
    _note_start(draft, number)
    wrong = "; ".join(mistakes.of_training(draft.spec))
    if wrong:
        # NB: the template may have changed since the job was accepted.
        draft.set(ConditionType.PODS_HEALTHY, False, ConditionReason.POD_TEMPLATE_INVALID, wrong)
        message = f"attempt {number} waits for a correction of spec.podTemplate"
        draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)
        return
    for ghost in found.ghosts:
        draft.remove(ghost)
    if found.ghosts or found.ghost_pods:
        message = (
            f"attempt {number} starts when {pod_state.listed_ghosts(found)} of the previous one has stopped"
        )
        draft.set(ConditionType.TRAINED, False, ConditionReason.RESTARTING, message)
        draft.requeue_after(draft.settings.poll_seconds)
        return
    _delete_old_jobs(draft, number, found)
    health.forget_refusal(draft)
    draft.apply += [gang.service(draft), gang.recipe(draft), gang.job(draft, number)]
    nodes = draft.spec.distributed.nodes
    draft.update(nodes=placement.nodes([], desired=nodes))
    starting = "1 pod is starting" if nodes == 1 else f"{nodes} pods are starting"
    message = f"attempt {number}: {starting}{attempts.cause_of(draft, number - 1)}"
    draft.set(ConditionType.TRAINED, False, ConditionReason.STARTING, message)


def _note_start(draft: Draft, number: int) -> None:
    draft.note_start()
    draft.update(attempt=number, restarts=draft.status.restarts or 0)


def _delete_old_jobs(draft: Draft, number: int, found: Sorted) -> None:
    """Delete the Jobs of older attempts, since preemptions are not limited in number."""
    kept = {names.train_name(draft.ftj.name, number - back) for back in range(_KEPT_ATTEMPTS + 1)}
    for child in found.ended:
        if child["metadata"]["name"] not in kept:
            draft.remove(child)


def _follow(draft: Draft, number: int, child: Json, mine: list[Json]) -> None:
    name, nodes = child["metadata"]["name"], draft.spec.distributed.nodes
    alive = pod_state.alive(mine)
    draft.requeue_after(draft.settings.poll_seconds)
    if queueing.is_queued(child) and not alive:
        queueing.report(draft, ConditionType.TRAINED, f"attempt {number}", child)
        return
    health.report(draft, alive, name, wanted=nodes)
    ready = draft.status.nodes.ready if draft.status.nodes else 0
    if ready == nodes:
        reason = ConditionReason.TRAINING
        gang = "1 pod" if nodes == 1 else f"{nodes} pods"
        message = f"attempt {number} runs on {gang}; kubectl logs job/{name} shows its progress"
    else:
        reason = ConditionReason.STARTING
        earlier = attempts.cause_of(draft, number - 1)
        message = (
            f"attempt {number}: {ready} of {nodes} pods are ready{health.pulling(draft, alive)}"
            f"{own_code.step(alive)}{earlier}"
        )
    if job_condition(child, "FailureTarget") and alive:
        # NB: the pods of a lost node do not end, and neither does the attempt.
        message = f"attempt {number} has failed and ends when {pod_state.listed(alive)} has stopped"
    draft.set(ConditionType.TRAINED, False, reason, message)


def _finish(draft: Draft, mine: list[Json]) -> None:
    results = [
        ended.message.train
        for ended in pod_state.exits(mine, gang.CONTAINER)
        if ended.message and ended.message.train
    ]
    if results:
        result = results[0]
        before = draft.status.model or ModelStatus()
        known = {
            "base_eval_loss": result.base_eval_loss,
            "eval_loss": result.eval_loss,
            "perplexity": result.perplexity,
        }
        rounded = {key: track.rounded(value, 4) for key, value in known.items()}
        finite = {key: value for key, value in rounded.items() if value is not None}
        if finite:
            draft.update(model=before.model_copy(update=finite))
        track.note_goodput(draft, result.goodput)
        _complete_progress(draft, result.step)
    _note_folder(draft)
    draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "every pod completed")
    draft.set(
        ConditionType.TRAINED, True, ConditionReason.TRAINED, f"attempt {draft.status.attempt} completed"
    )


def _note_folder(draft: Draft) -> None:
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
