"""What a sweep's FineTuneJobs take over from it while they run: suspend, runPolicy and pods."""

from __future__ import annotations

from collections.abc import Collection

from finetune_crds.base import join_names
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.batch.state import is_being_deleted
from finetune_operator.finetunejob.decide.ready import OBSTACLES
from finetune_operator.finetunejob.decision import SpecChange
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.sweep import objects, trial_state
from finetune_operator.policy.result import Continue, Outcome, Stop


def follow_parent(draft: Draft, *, is_suspended: bool, waiting: Collection[str] = ()) -> None:
    """Change the spec of the FineTuneJobs that have not finished, where it does not follow the spec of the sweep.

    Args:
        is_suspended: whether all of them are to be suspended.
        waiting: the names of the trials that wait at a rung, and are suspended in any case.
    """
    ftj, best = draft.ftj, objects.best_name(draft.ftj.name)
    followed = {
        delivers: objects.build_followed_fields(ftj, delivers=delivers, is_suspended=is_suspended)
        for delivers in (False, True)
    }
    for name, child in draft.observed.children.items():
        if trial_state.is_finished(child) or is_being_deleted(child):
            continue
        expected = followed[name == best]
        if name in waiting:
            expected = {**expected, "suspend": True}
        changes = objects.list_changes(child, expected)
        if changes:
            draft.changed.append(SpecChange(name, child["metadata"]["uid"], changes))


def suspend(draft: Draft) -> Outcome:
    """If spec.suspend is set, suspend all FineTuneJobs of the sweep, and end the pass."""
    if not draft.spec.suspend:
        return Continue
    follow_parent(draft, is_suspended=True)
    if not draft.status.suspend_time:
        draft.update(suspend_time=draft.now)
    running = [
        name
        for name, child in draft.observed.children.items()
        if trial_state.read_phase(child) not in ("Suspended", *FINISHED_PHASES)
    ]
    message = "every trial is suspended or has ended; set suspend to false to resume"
    if running:
        message = f"waiting until {join_names(running)} {'is' if len(running) == 1 else 'are'} suspended"
    draft.set(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message)
    if draft.condition(ConditionType.PODS_HEALTHY):
        draft.set(
            ConditionType.PODS_HEALTHY,
            None,
            ConditionReason.NO_PODS,
            "no pod should run: the job is suspended",
        )
    return Stop


def report_obstacle(draft: Draft) -> None:
    """Report what keeps a FineTuneJob of the sweep from making progress, in its own words."""
    obstacles = (
        (name, obstacle)
        for name, child in draft.observed.children.items()
        if not trial_state.is_finished(child)
        and (obstacle := trial_state.find_false_condition(child, OBSTACLES))
    )
    name, obstacle = next(obstacles, ("", None))
    if obstacle:
        reason, message = ConditionReason(obstacle["reason"]), f"{name}: {obstacle['message']}"
        draft.set(ConditionType.PODS_HEALTHY, False, reason, message)
    elif draft.condition(ConditionType.PODS_HEALTHY):
        draft.set(ConditionType.PODS_HEALTHY, True, ConditionReason.PODS_RUNNING, "no trial is blocked")
