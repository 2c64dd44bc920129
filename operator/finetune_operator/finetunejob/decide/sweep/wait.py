"""The waiting time of a sweep, which its deadline excludes: the time in which each trial that runs waits."""

from __future__ import annotations

from finetune_operator.finetunejob.decide import deadline
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.sweep import trial_state
from finetune_operator.policy.result import Continue, Outcome


def record_waiting(draft: Draft) -> Outcome:
    """Record when a started sweep began to wait, and the total time of its earlier waits."""
    running = [child for child in draft.observed.children.values() if not trial_state.is_finished(child)]
    if draft.status.start_time is not None:
        is_waiting = bool(running) and all(map(trial_state.is_waiting, running))
        deadline.record_wait(draft, is_waiting=draft.spec.suspend or is_waiting)
    return Continue
