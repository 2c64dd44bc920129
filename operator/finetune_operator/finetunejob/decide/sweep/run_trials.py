"""Starts the trials of a sweep in the order of their numbers, and reports how far they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from finetune_crds.base import Json, join_names
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus, Progress
from finetune_crds.status_parts import Usage
from finetune_crds.sweep import SweepStatus, Trial
from finetune_operator.finetunejob.decide import track
from finetune_operator.finetunejob.decide.sweep import follow
from finetune_operator.finetunejob.decide.sweep.check_trials import get_sweep
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import SOON_SECONDS
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.sweep import metric, objects, rungs, search_space, trial_state, values
from finetune_operator.policy.result import Continue, Outcome, Stop

# Digits of the metric in messages and in the column PROGRESS.
_METRIC_DIGITS = 4


def run_trials(draft: Draft) -> Outcome:
    """Until all trials have ended, each pass ends here."""
    if draft.holds(ConditionType.TRAINED):
        _follow(draft, get_recorded_trials(draft))
        return Continue
    plan = read_plan(draft)
    trials = _read_trials(draft, plan)
    if _has_too_many_failures(draft, trials):
        return Stop
    if not track.may_train(draft):
        _follow(draft, trials)
        _record(draft, plan, trials)
        track.report_wait(draft)
        return Stop
    trials = _promote_trials(draft, plan, trials)
    if not _are_done(draft, plan, trials):
        trials = _start_trials(draft, plan, trials)
        if draft.suggestions:
            return Stop
        _follow(draft, trials)
        _record(draft, plan, trials)
        _report(draft, plan, trials)
        return Stop
    _record(draft, plan, trials, are_done=True)
    return _finish(draft, trials)


def get_recorded_trials(draft: Draft) -> list[Trial]:
    """The trials in the status, by number."""
    return draft.status.sweep.trials if draft.status.sweep else []


def _follow(draft: Draft, trials: Sequence[Trial]) -> None:
    """Let the trials follow the spec of the sweep; those that wait at a rung are suspended."""
    waiting = {objects.trial_name(draft.ftj.name, trial.n) for trial in trials if rungs.is_waiting(trial)}
    follow.follow_parent(draft, is_suspended=False, waiting=waiting)


def _promote_trials(draft: Draft, plan: Plan, trials: list[Trial]) -> list[Trial]:
    """With ASHA, promote trials that wait at a rung. If nothing else is left to do, one trial always passes all rungs."""
    sweep = get_sweep(draft)
    if not sweep.rungs:
        return trials
    trials = rungs.promote(sweep, trials, sweep.parallel - sum(map(rungs.is_active, trials)))
    has_result = any(trial.metric is not None and rungs.has_passed_all(sweep, trial) for trial in trials)
    if _are_done(draft, plan, trials) and not has_result:
        return rungs.promote_furthest(sweep, trials)
    return trials


def _are_done(draft: Draft, plan: Plan, trials: Sequence[Trial]) -> bool:
    """Whether every trial has ended or waits at a rung, suspended, and nothing is left to read of any of them."""
    are_settled = all(map(_is_settled, trials))
    return len(trials) == plan.planned and are_settled and not _list_due_reads(draft, trials)


def _is_settled(trial: Trial) -> bool:
    return trial.phase in FINISHED_PHASES or (rungs.is_waiting(trial) and trial.phase == "Suspended")


def _list_due_reads(draft: Draft, trials: Sequence[Trial]) -> list[rungs.DueRead]:
    """The evaluations that are yet to be read. What the run of an ended trial lacks, it never gets: somebody deleted it, for example."""
    recorded = SweepStatus(trials=list(trials))
    due_reads = rungs.list_due_reads(get_sweep(draft), recorded, draft.observed.children, draft.ftj.name)
    complete = {trial.n for trial in trials if trial.phase in FINISHED_PHASES} & {*draft.observed.evaluations}
    return [due for due in due_reads if due.number not in complete]


class Plan(NamedTuple):
    """The trials of a sweep: how many there are, and the values of those whose values are known, by number."""

    planned: int
    values: Mapping[int, values.Values]


def read_plan(draft: Draft) -> Plan:
    """The trials of the sweep. TPE chooses the values of a trial only when it can start, and the status records them."""
    sweep = get_sweep(draft)
    if sweep.algorithm == "TPE":
        recorded_values = {
            trial.n: search_space.read_values(sweep, trial) for trial in get_recorded_trials(draft)
        }
        return Plan(sweep.trials or 1, recorded_values)
    trials = values.list_trials(sweep)
    return Plan(len(trials), dict(enumerate(trials, start=1)))


def describe_best(draft: Draft, best: Trial) -> str:
    """The best trial, its metric and its values, as part of a sentence."""
    name = objects.trial_name(draft.ftj.name, best.n)
    described = ", ".join(f"{field} {text}" for field, text in best.parameters.items())
    return f"{name} is the best, with {get_sweep(draft).metric} {_format_metric(best)} ({described})"


def _read_trials(draft: Draft, plan: Plan) -> list[Trial]:
    """The trials that exist or have ended, by number. An end is final, even if somebody has deleted the trial since."""
    sweep = get_sweep(draft)
    recorded = {trial.n: trial for trial in get_recorded_trials(draft)}
    trials: list[Trial] = []
    for number, trial_values in plan.values.items():
        before = recorded.get(number)
        child = draft.observed.children.get(objects.trial_name(draft.ftj.name, number))
        if before and before.phase in FINISHED_PHASES:
            trials.append(_read_rungs(draft, before, child))
        elif before and child is None and rungs.is_waiting(before):
            # It has no pods. It is created again only if it is promoted.
            trials.append(before.model_copy(update={"phase": "Suspended"}))
        elif child and metric.is_undecided(sweep, before, child) and number not in draft.observed.evaluations:
            # Its end is recorded with its value.
            trials.append(before or _plan_trial(number, trial_values))
        elif child:
            trial = _keep_rungs(_read_trial(draft, number, trial_values, child), before)
            trials.append(_read_rungs(draft, trial, child))
    return trials


def _read_trial(draft: Draft, number: int, trial_values: values.Values, child: Json) -> Trial:
    # NB: the step changes with each progress of a trial, and each change would write the status of the sweep.
    has_ended = trial_state.is_finished(child)
    values_by_step = draft.observed.evaluations.get(number, {})
    value = metric.read_value(draft.spec, get_sweep(draft), child, values_by_step)
    return Trial(
        n=number,
        parameters=_format_parameters(trial_values),
        metric=None if _has_other_rows(draft, child) else value,
        step=trial_state.read_step(child) if has_ended else None,
        phase=trial_state.read_phase(child),
    )


def _keep_rungs(trial: Trial, before: Trial | None) -> Trial:
    """The trial with the rungs that the status records. Also of a trial that starts again, because somebody deleted it."""
    return (
        trial.model_copy(update={"rungs": before.rungs, "promotions": before.promotions}) if before else trial
    )


def _read_rungs(draft: Draft, trial: Trial, child: Json | None) -> Trial:
    """The trial with the rungs that it has reached; without ASHA, unchanged."""
    sweep = get_sweep(draft)
    if not sweep.rungs:
        return trial
    values_by_step = draft.observed.evaluations.get(trial.n, {})
    is_comparable = child is None or not _has_other_rows(draft, child)
    return rungs.record_rungs(sweep, trial, values_by_step, is_comparable=is_comparable)


def _has_other_rows(draft: Draft, child: Json) -> bool:
    """Whether a trial read other rows than the first one, because the source has changed: their losses are not comparable.

    Trials with different objectives may prepare the same rows differently.
    """
    if any(parameter.field.partition(".")[0] == "objective" for parameter in get_sweep(draft).parameters):
        return False
    digest = (trial_state.read_part(child, "data") or {}).get("digest")
    first = draft.status.data.digest if draft.status.data else None
    return None not in (digest, first) and digest != first


def _describe_other_rows(draft: Draft) -> str:
    """The trials with other rows, as the end of a sentence; empty without such a trial."""
    names = [name for name, child in draft.observed.children.items() if _has_other_rows(draft, child)]
    if not names:
        return ""
    return f"; {join_names(names)} read other rows, since the source has changed, and cannot be the best"


def _format_parameters(trial_values: values.Values) -> dict[str, str]:
    return {field: values.format_value(value) for field, value in trial_values.items()}


def _start_trials(draft: Draft, plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Create the FineTuneJobs of the next trials, or request their values, and return all trials that have started."""
    recorded = {trial.n: trial for trial in get_recorded_trials(draft)}
    places = max(get_sweep(draft).parallel - sum(map(rungs.is_active, trials)), 0)
    started_numbers = {trial.n for trial in trials}
    waiting_numbers = [number for number in range(1, plan.planned + 1) if number not in started_numbers]
    next_numbers = waiting_numbers[:places]
    new_trials: list[Trial] = []
    for number in next_numbers:
        if number in plan.values:
            draft.apply.append(objects.build_trial(draft.ftj, number, plan.values[number]))
            new_trials.append(_keep_rungs(_plan_trial(number, plan.values[number]), recorded.get(number)))
    unknown_numbers = [number for number in next_numbers if number not in plan.values]
    if unknown_numbers:
        new_trials += _choose_values(draft, trials + new_trials, unknown_numbers)
    if new_trials or trials:
        draft.record_start()
    return sorted([*trials, *new_trials], key=lambda trial: trial.n)


def _choose_values(draft: Draft, trials: Sequence[Trial], numbers: Sequence[int]) -> list[Trial]:
    """Return the trials with the values that were suggested, or request them.

    NB: the status must have the values before the FineTuneJob exists: after a crash, another suggestion might differ.
    """
    sweep, suggestions = get_sweep(draft), draft.observed.suggestions
    if suggestions is None:
        draft.suggestions = search_space.build_request(sweep, trials, numbers)
        return []
    draft.requeue_after(SOON_SECONDS)
    return [_plan_trial(number, search_space.decode(sweep, suggestions[str(number)])) for number in numbers]


def _plan_trial(number: int, trial_values: values.Values) -> Trial:
    return Trial(n=number, parameters=_format_parameters(trial_values), phase="Pending")


def _has_too_many_failures(draft: Draft, trials: Sequence[Trial]) -> bool:
    """Fail the job if more trials have failed than may."""
    failed = [trial for trial in trials if trial.phase == "Failed"]
    limit = get_sweep(draft).max_failed_trials
    if len(failed) <= limit:
        return False
    last = objects.trial_name(draft.ftj.name, failed[-1].n)
    child = draft.observed.children.get(last)
    condition = trial_state.find_condition(child, ConditionType.FAILED) if child else None
    why = f": {condition['message']}" if condition else ""
    draft.update(sweep=(draft.status.sweep or SweepStatus()).model_copy(update={"trials": list(trials)}))
    draft.fail(
        ConditionReason.TRIALS_FAILED,
        f"{len(failed)} trials have failed, and spec.sweep.maxFailedTrials is {limit}; the last one is {last}{why}",
    )
    return True


def _record(draft: Draft, plan: Plan, trials: list[Trial], *, are_done: bool = False) -> None:
    """Record the trials, the progress, the data and the usage.

    Args:
        are_done: whether no trial runs any more, so that those that wait at a rung have ended too.
    """
    numbers = {trial.n for trial in trials}
    # The values of a trial stay, even if somebody has deleted it.
    recorded = [trial for trial in get_recorded_trials(draft) if trial.n not in numbers]
    trials = sorted([*trials, *recorded], key=lambda trial: trial.n)
    best = metric.get_best(get_sweep(draft), trials)
    ended = sum(are_done or trial.phase in FINISHED_PHASES for trial in trials)
    draft.update(sweep=SweepStatus(best=best.n if best else None, planned=plan.planned, trials=trials))
    summary = f"{ended}/{plan.planned}" + (f", best {_format_metric(best)}" if best else "")
    draft.update(
        progress=Progress(
            percent=100 * ended // plan.planned,
            summary=summary,
            eval_loss=best.metric if best and get_sweep(draft).metric == metric.EVAL_LOSS else None,
        )
    )
    _record_data(draft)
    record_usage(draft)


def _record_data(draft: Draft) -> None:
    """Report the preparation of the first trial that has prepared or, without one, that prepares: the others wait for it."""
    if draft.holds(ConditionType.PREPARED):
        return
    conditions = [
        (child, condition)
        for child in draft.observed.children.values()
        if (condition := trial_state.find_condition(child, ConditionType.PREPARED))
    ]
    waiting = ConditionReason.WAITING_FOR_PREPARATION
    conditions.sort(key=lambda item: (item[1]["status"] != "True", item[1]["reason"] == waiting))
    if not conditions:
        return
    child, condition = conditions[0]
    is_prepared, reason = condition["status"] == "True", ConditionReason(condition["reason"])
    draft.set(ConditionType.PREPARED, is_prepared, reason, condition["message"])
    data = trial_state.read_part(child, "data")
    if is_prepared and data:
        draft.update(data=DataStatus.model_validate(data))


def record_usage(draft: Draft) -> None:
    """Record the sum of what the FineTuneJobs of the sweep used. Metrics count the usage of each of them, so it has no Jobs."""
    parts = [trial_state.read_part(child, "usage") or {} for child in draft.observed.children.values()]
    pod_hours = round(sum(part.get("podHours", 0.0) for part in parts), 2)
    gpu_hours = round(sum(part.get("gpuHours", 0.0) for part in parts), 2)
    # NB: somebody may have deleted a trial, whose usage stays.
    before = draft.status.usage
    if pod_hours and (before is None or pod_hours > before.pod_hours):
        draft.update(usage=Usage(pod_hours=pod_hours, gpu_hours=gpu_hours, jobs=[]))


def _report(draft: Draft, plan: Plan, trials: Sequence[Trial]) -> None:
    """Report which trials run, and the best one so far."""
    running = [trial for trial in trials if rungs.is_active(trial)]
    phases = {trial.phase for trial in running}
    reason = ConditionReason.STARTING
    if "Training" in phases:
        reason = ConditionReason.TRAINING
    elif phases == {"Queued"}:
        reason = ConditionReason.QUEUED
    names = ", ".join(objects.trial_name(draft.ftj.name, trial.n) for trial in running)
    waiting = sum(map(rungs.is_waiting, trials))
    message = f"{len(trials) - len(running) - waiting} of {plan.planned} trials have ended"
    message += f", {waiting} {'wait' if waiting > 1 else 'waits'} at a rung" if waiting else ""
    message += f"; {names or 'none'} {'run' if len(running) > 1 else 'runs'}"
    best = metric.get_best(get_sweep(draft), trials)
    if best:
        message += f"; {describe_best(draft, best)}"
    message += _describe_other_rows(draft)
    unread = [objects.trial_name(draft.ftj.name, due.number) for due in _list_due_reads(draft, trials)]
    if unread:
        # MLflow may be away, and a trial may have reported its step a moment before its evaluation.
        draft.requeue_after(draft.settings.poll_seconds)
        message += f"; waiting for the evaluations of {join_names(unread)} in MLflow"
    draft.set(ConditionType.TRAINED, False, reason, message)
    follow.report_obstacle(draft)


def _finish(draft: Draft, trials: Sequence[Trial]) -> Outcome:
    """Record the end of the trials. Without a metric, the job fails."""
    best = metric.get_best(get_sweep(draft), trials)
    if best is None:
        draft.fail(
            ConditionReason.TRIALS_FAILED,
            f"no trial has a value of {get_sweep(draft).metric}: correct the cause of the failed trials, or let data have a validation split, and create a "
            "FineTuneJob with another name",
        )
        return Stop
    count = f"{len(trials)} trials have ended" if len(trials) > 1 else "1 trial has ended"
    failed = sum(trial.phase == "Failed" for trial in trials)
    stopped = sum(map(rungs.is_waiting, trials))
    details = f", {failed} of them failed" if failed else ""
    details += f", {stopped} of them at a rung" if stopped else ""
    draft.set(
        ConditionType.TRAINED,
        True,
        ConditionReason.TRAINED,
        f"{count}{details}; {describe_best(draft, best)}{_describe_other_rows(draft)}",
    )
    return Continue


def delete_waiting(draft: Draft) -> None:
    """Delete the trials that wait at a rung when the sweep has succeeded, which closes their runs in MLflow.

    NB: not before, since the usage is the sum over the FineTuneJobs that exist. The status is written after the deletions, so an interrupted
    pass is repeated.
    """
    for trial in get_recorded_trials(draft):
        child = draft.observed.children.get(objects.trial_name(draft.ftj.name, trial.n))
        if child and rungs.is_waiting(trial):
            draft.remove(child, "FineTuneJob")


def _format_metric(trial: Trial) -> str:
    return f"{trial.metric:.{_METRIC_DIGITS}g}"
