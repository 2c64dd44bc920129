"""The last FineTuneJob of a sweep: it registers the model of the best trial or writes it to spec.output, evaluates it, and sets the aliases."""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.evaluation import EvaluationStatus
from finetune_crds.status import CheckpointStatus, ModelStatus
from finetune_operator.finetunejob.decide.sweep import follow, run_trials
from finetune_operator.finetunejob.decide.sweep.check_trials import get_sweep
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.sweep import metric, objects, trial_state
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.policy.status import read_state


def deliver(draft: Draft) -> Outcome:
    """Copy the model of the best trial to the status. If the job delivers it, end each pass until it is delivered."""
    name = objects.best_name(draft.ftj.name)
    child = draft.observed.children.get(name)
    run_trials.record_usage(draft)
    if child is None:
        return _begin(draft, name)
    follow.report_obstacle(draft)
    _copy(draft, child)
    phase = trial_state.read_phase(child)
    if phase == "Succeeded":
        if draft.spec.register_ is None:
            # It has written spec.output, and registered nothing.
            draft.unset(ConditionType.REGISTERED)
        return Continue
    if phase == "Failed":
        _fail(draft, name, child)
    return Stop


def _begin(draft: Draft, name: str) -> Outcome:
    """Create the FineTuneJob that delivers the model; without a model to deliver, the job is complete."""
    best = metric.get_best(get_sweep(draft), run_trials.get_recorded_trials(draft))
    trial = draft.observed.children.get(objects.trial_name(draft.ftj.name, best.n)) if best else None
    if trial:
        # Its losses and its newest checkpoint.
        _copy(draft, trial)
    if not objects.delivers_model(draft.spec):
        return Continue
    if best is None or trial is None:
        draft.fail(
            ConditionReason.TRIALS_FAILED,
            "the best trial was deleted before its model was registered: create a FineTuneJob with another name",
        )
        return Stop
    trial_values = run_trials.read_plan(draft).values[best.n]
    draft.apply.append(objects.build_best(draft.ftj, best.n, trial_values, step=best.step))
    message = f"FineTuneJob {name} delivers the model of trial {best.n} from its last checkpoint"
    draft.set(ConditionType.REGISTERED, False, ConditionReason.REGISTERING, message)
    return Stop


def _copy(draft: Draft, child: Json) -> None:
    """Copy from a FineTuneJob of the sweep what it says about the model."""
    model = trial_state.read_part(child, "model")
    if model:
        draft.update(model=ModelStatus.model_validate(model))
    evaluation = trial_state.read_part(child, "evaluation")
    if evaluation:
        draft.update(evaluation=EvaluationStatus.model_validate(evaluation))
    checkpoint = trial_state.read_part(child, "checkpoint")
    if checkpoint:
        draft.update(checkpoint=CheckpointStatus.model_validate(checkpoint))
    for kind in (ConditionType.EVALUATED, ConditionType.REGISTERED):
        condition = trial_state.find_condition(child, kind)
        if condition:
            holds = read_state(condition["status"])
            draft.set(kind, holds, ConditionReason(condition["reason"]), condition["message"])


def _fail(draft: Draft, name: str, child: Json) -> None:
    failed = trial_state.find_condition(child, ConditionType.FAILED) or {}
    draft.fail(
        ConditionReason(failed.get("reason", ConditionReason.TRIALS_FAILED)),
        f"FineTuneJob {name}, which delivers the model of the best trial, failed: {failed.get('message', '')}",
    )
