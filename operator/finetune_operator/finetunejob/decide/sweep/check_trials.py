"""Checks all trials of a sweep before the first one starts: a mistake in the last one must not show after days."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice

from pydantic import ValidationError

from finetune_crds.base import Json, first_mistake
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.sweep import Sweep, SweepStatus
from finetune_operator.finetunejob.decide.accept import permanent_mistakes
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import Refusal, refuse
from finetune_operator.finetunejob.model import DryRunAnswer, FineTuneJob
from finetune_operator.finetunejob.sweep import objects, search_space, values
from finetune_operator.policy.result import Continue, Outcome, Stop

# A message names so many trials at most.
_MAX_NAMED_TRIALS = 3


def get_sweep(draft: Draft) -> Sweep:
    """The sweep of a job that has one."""
    if draft.spec.sweep is None:
        raise ValueError(f"{draft.ftj.key} has no sweep")
    return draft.spec.sweep


def check_trials(draft: Draft) -> Outcome:
    """Let the API server check every trial in a dry run, once; then `status.sweep` records that all of them are accepted."""
    if draft.status.sweep is not None:
        return Continue
    sweep = get_sweep(draft)
    mistake = values.find_mistake(sweep)
    if mistake:
        return refuse(draft, ConditionType.ACCEPTED, Refusal(ConditionReason.INVALID_SPEC, mistake))
    # Of TPE, the corners of the search space.
    trials = search_space.list_corners(sweep) if sweep.algorithm == "TPE" else values.list_trials(sweep)
    answer = draft.observed.dry_run_answer
    if answer is None:
        draft.dry_runs += _build_dry_runs(draft.ftj, trials)
        return Stop
    if answer.admitted is not True:
        return _report_refusal(draft, answer)
    mistakes = list(islice(_find_mistakes(draft.ftj, trials), _MAX_NAMED_TRIALS))
    if mistakes:
        return refuse(
            draft, ConditionType.ACCEPTED, Refusal(ConditionReason.INVALID_SPEC, "; ".join(mistakes))
        )
    draft.unset(ConditionType.PODS_ADMITTED)
    planned = sweep.trials if sweep.algorithm == "TPE" and sweep.trials else len(trials)
    draft.update(sweep=SweepStatus(planned=planned))
    return Continue


def _build_dry_runs(ftj: FineTuneJob, trials: list[values.Values]) -> list[Json]:
    """All trials, and the FineTuneJob that delivers the best model, if there is one."""
    bodies = [objects.build_trial(ftj, number, trial) for number, trial in enumerate(trials, start=1)]
    if ftj.spec and objects.delivers_model(ftj.spec):
        bodies.append(objects.build_best(ftj, 1, trials[0], step=None))
    return bodies


def _report_refusal(draft: Draft, answer: DryRunAnswer) -> Outcome:
    """Fail the job if a trial is invalid, since spec.sweep cannot change; otherwise wait until the API server accepts the trials."""
    if answer.reason == ConditionReason.POD_TEMPLATE_INVALID:
        refusal = Refusal(ConditionReason.INVALID_SPEC, f"a trial of spec.sweep is invalid: {answer.message}")
        return refuse(draft, ConditionType.ACCEPTED, refusal)
    draft.set(ConditionType.PODS_ADMITTED, answer.admitted, answer.reason, answer.message)
    draft.requeue_after(answer.retry_seconds or draft.settings.poll_seconds)
    return Stop


def _find_mistakes(ftj: FineTuneJob, trials: list[values.Values]) -> Iterator[str]:
    """What the operator itself would refuse in a trial, with the trial's name and values."""
    for number, trial in enumerate(trials, start=1):
        body = objects.build_trial(ftj, number, trial)
        try:
            spec = FineTuneJobSpec.model_validate(body["spec"])
        except ValidationError as error:
            mistakes = [f"spec.{': '.join(first_mistake(error))}"]
        else:
            child = dataclasses.replace(
                ftj, name=body["metadata"]["name"], written=spec, spec=spec, status=FineTuneJobStatus()
            )
            mistakes = permanent_mistakes(child)
        if mistakes:
            described = values.format_values(trial)
            yield f"trial {body['metadata']['name']} ({described}) is invalid: {'; '.join(mistakes)}"
