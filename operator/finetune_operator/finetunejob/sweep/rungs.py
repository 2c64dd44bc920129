"""Asynchronous successive halving (ASHA): which trials wait at a rung, and which are promoted.

Algorithm 2 of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv:1810.05934), with a limit of trials. A trial that
waits is suspended, so it can be promoted whenever the trials that reach its rung after it are worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.sweep import Rung, Sweep, SweepStatus, Trial
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.sweep import metric, objects, trial_state

REDUCTION_FACTOR = 3
"""Of so many trials at a rung, one is promoted."""


class DueRead(NamedTuple):
    """A trial whose evaluations have to be read.

    Attributes:
        step: the step of the rung that it has reached; None: it has ended, and the status has no value of it yet.
    """

    number: int
    run_id: str
    step: int | None


def is_waiting(trial: Trial) -> bool:
    """Whether a trial waits at a rung: it has reached the rung, and was not promoted."""
    return trial.phase not in FINISHED_PHASES and len(trial.rungs or ()) > (trial.promotions or 0)


def has_passed_all(sweep: Sweep, trial: Trial) -> bool:
    """Whether a trial was promoted from every rung. One that has ended without may have stopped early."""
    return (trial.promotions or 0) == len(sweep.rungs or ())


def is_active(trial: Trial) -> bool:
    """Whether a trial occupies one of the places of `sweep.parallel`."""
    return trial.phase not in FINISHED_PHASES and not is_waiting(trial)


def list_due_reads(
    sweep: Sweep, recorded: SweepStatus | None, children: Mapping[str, Json], name: str
) -> list[DueRead]:
    """The trials whose evaluations have to be read, in the order of their numbers.

    Args:
        children: the FineTuneJobs of the sweep, by name.
        name: the name of the sweep.
    """
    due_reads: list[DueRead] = []
    for trial in recorded.trials if recorded else ():
        child = children.get(objects.trial_name(name, trial.n), {})
        run_id = (trial_state.read_part(child, "mlflow") or {}).get("runId")
        step = next(_list_next_steps(sweep, trial), None)
        has_reached = step is not None and trial_state.has_reached(child, step)
        if run_id and (has_reached or metric.is_undecided(sweep, trial, child)):
            due_reads.append(DueRead(trial.n, run_id, step if has_reached else None))
    return due_reads


def record_rungs(sweep: Sweep, trial: Trial, values: Mapping[int, float], *, is_comparable: bool) -> Trial:
    """The trial with the rungs that it has reached since.

    Args:
        values: the values of the metric at the evaluations of the trial, by step.
        is_comparable: whether the trial reads the rows of the other trials. Without, it has no value at a rung, and is never promoted.
    """
    reached = list(trial.rungs or ())
    for step in _list_next_steps(sweep, trial):
        if step not in values:
            break
        is_finite = math.isfinite(values[step])
        reached.append(Rung(step=step, metric=values[step] if is_finite and is_comparable else None))
    return trial.model_copy(update={"rungs": reached, "promotions": trial.promotions or 0})


def _list_next_steps(sweep: Sweep, trial: Trial) -> Iterator[int]:
    """The steps of the rungs that a trial trains to. One that has ended may have passed all of them."""
    has_ended = trial.phase in FINISHED_PHASES
    last = None if has_ended else (trial.promotions or 0) + 1
    return iter(sorted(sweep.rungs or ())[len(trial.rungs or ()) : last])


def promote(sweep: Sweep, trials: Sequence[Trial], places: int) -> list[Trial]:
    """The trials, of which those are promoted that may be, as long as there are places."""
    promoted = {trial.n: trial for trial in trials}
    for _place in range(places):
        trial = _find_promotable(sweep, list(promoted.values()))
        if trial is None:
            break
        promoted[trial.n] = _promote(trial)
    return list(promoted.values())


def promote_furthest(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """The trials, of which the best one at the highest rung is promoted: with few trials, none is among the best third."""
    waiting = [trial for trial in trials if _may_pass(trial)]
    if not waiting:
        return list(trials)
    furthest = min(
        waiting, key=lambda trial: (-len(trial.rungs or ()), _rank(sweep, trial, len(trial.rungs or ()) - 1))
    )
    return [_promote(trial) if trial is furthest else trial for trial in trials]


def _find_promotable(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """The best trial of the highest rung at which one of the best third waits."""
    for rung in reversed(range(len(sweep.rungs or ()))):
        at_rung = sorted(
            (trial for trial in trials if len(trial.rungs or ()) > rung),
            key=lambda trial: _rank(sweep, trial, rung),
        )
        best_third = at_rung[: len(at_rung) // REDUCTION_FACTOR]
        promotable = (trial for trial in best_third if _may_pass(trial) and trial.promotions == rung)
        trial = next(promotable, None)
        if trial:
            return trial
    return None


def _may_pass(trial: Trial) -> bool:
    """Whether a trial waits at a rung with a value that can be compared."""
    return is_waiting(trial) and (trial.rungs or [])[-1].metric is not None


def _rank(sweep: Sweep, trial: Trial, rung: int) -> tuple[float, int]:
    """The key to sort the trials at a rung by."""
    return metric.rank(sweep, (trial.rungs or [])[rung].metric, trial.n)


def _promote(trial: Trial) -> Trial:
    return trial.model_copy(update={"promotions": (trial.promotions or 0) + 1})
