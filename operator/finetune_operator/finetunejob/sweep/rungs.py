"""Asynchronous successive halving (ASHA): which trials wait at a rung, and which go on.

Algorithm 2 of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv:1810.05934), with a limit of trials. A trial that
waits is suspended, so it can go on whenever the trials that reach its rung after it are worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.sweep import Rung, Sweep, SweepStatus, Trial
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.sweep import objects, trial_state

REDUCTION_FACTOR = 3
"""Of so many trials at a rung, one goes on."""


class DueRung(NamedTuple):
    """A rung that a trial has reached, and whose loss is not recorded yet."""

    number: int
    run_id: str
    step: int


def is_waiting(trial: Trial) -> bool:
    """Whether a trial waits at a rung: it has reached the rung, and may not go on yet."""
    return trial.phase not in FINISHED_PHASES and len(trial.rungs or ()) > (trial.promotions or 0)


def is_active(trial: Trial) -> bool:
    """Whether a trial occupies one of the places of `sweep.parallel`."""
    return trial.phase not in FINISHED_PHASES and not is_waiting(trial)


def list_due_rungs(
    sweep: Sweep, recorded: SweepStatus | None, children: Mapping[str, Json], name: str
) -> list[DueRung]:
    """The rungs whose losses have to be read, by the number of the trial.

    Args:
        children: the FineTuneJobs of the sweep, by name.
        name: the name of the sweep.
    """
    due_rungs: list[DueRung] = []
    for trial in recorded.trials if recorded else ():
        child = children.get(objects.trial_name(name, trial.n), {})
        run_id = (trial_state.read_part(child, "mlflow") or {}).get("runId")
        next_step = next(_list_next_steps(sweep, trial), None)
        if run_id and next_step and next_step <= (trial_state.read_step(child) or 0):
            due_rungs.append(DueRung(trial.n, run_id, next_step))
    return due_rungs


def record_rungs(sweep: Sweep, trial: Trial, losses: Mapping[int, float], *, is_comparable: bool) -> Trial:
    """The trial with the rungs that it has reached since.

    Args:
        losses: evaluation losses of the trial, by step.
        is_comparable: whether the trial reads the rows of the other trials. Without, it stays at its next rung.
    """
    reached = list(trial.rungs or ())
    for step in _list_next_steps(sweep, trial):
        if step not in losses:
            break
        is_finite = math.isfinite(losses[step])
        reached.append(Rung(step=step, metric=losses[step] if is_finite and is_comparable else None))
    return trial.model_copy(update={"rungs": reached, "promotions": trial.promotions or 0})


def _list_next_steps(sweep: Sweep, trial: Trial) -> Iterator[int]:
    """The steps of the rungs that a trial trains to. One that has ended may have passed all of them."""
    has_ended = trial.phase in FINISHED_PHASES
    last = None if has_ended else (trial.promotions or 0) + 1
    return iter(sorted(sweep.rungs or ())[len(trial.rungs or ()) : last])


def promote(sweep: Sweep, trials: Sequence[Trial], places: int) -> list[Trial]:
    """The trials, of which as many go on as may, and as there are places for."""
    promoted = {trial.n: trial for trial in trials}
    for _place in range(places):
        trial = _find_promotable(sweep, list(promoted.values()))
        if trial is None:
            break
        promoted[trial.n] = _promote(trial)
    return list(promoted.values())


def promote_furthest(trials: Sequence[Trial]) -> list[Trial]:
    """The trials, of which the best one at the highest rung goes on: with few trials, none is among the lowest third."""
    waiting = [trial for trial in trials if is_waiting(trial)]
    if not waiting:
        return list(trials)
    furthest = min(
        waiting, key=lambda trial: (-len(trial.rungs or ()), *_rank(trial, len(trial.rungs or ()) - 1))
    )
    return [_promote(trial) if trial is furthest else trial for trial in trials]


def _find_promotable(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """The best trial of the highest rung at which one of the lowest third waits."""
    for rung in reversed(range(len(sweep.rungs or ()))):
        at_rung = sorted(
            (trial for trial in trials if len(trial.rungs or ()) > rung), key=lambda trial: _rank(trial, rung)
        )
        lowest = at_rung[: len(at_rung) // REDUCTION_FACTOR]
        promotable = (trial for trial in lowest if is_waiting(trial) and trial.promotions == rung)
        trial = next(promotable, None)
        if trial:
            return trial
    return None


def _rank(trial: Trial, rung: int) -> tuple[float, int]:
    """What the trials at a rung are sorted by: their losses there and, of equal ones, their numbers."""
    metric = (trial.rungs or [])[rung].metric
    return (math.inf if metric is None else metric, trial.n)


def _promote(trial: Trial) -> Trial:
    return trial.model_copy(update={"promotions": (trial.promotions or 0) + 1})
