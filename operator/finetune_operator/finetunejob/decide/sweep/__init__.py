"""The policies of a job with `spec.sweep`: its FineTuneJobs train, and it reports for all of them."""

from __future__ import annotations

from finetune_crds.conditions import ConditionType
from finetune_operator.finetunejob.decide import accept, deadline, finish, resolve_alias, suspend, track
from finetune_operator.finetunejob.decide.sweep import check_trials, deliver, follow, run_trials, wait
from finetune_operator.finetunejob.draft.draft import Draft

POLICIES = (
    accept.accept,
    wait.record_waiting,
    suspend.resume,
    resolve_alias.pin_versions,
    check_trials.check_trials,
    track.track,
    # Ends the pass of a suspended job.
    follow.suspend,
    deadline.enforce_deadline,
    run_trials.run_trials,
    deliver.deliver,
    finish.succeed,
)


def clean_up(draft: Draft) -> None:
    """Suspend the trials that still run, close the MLflow run, and delete FineTuneJobs: those at a rung, and all when the TTL expires."""
    if draft.holds(ConditionType.SUCCEEDED):
        run_trials.delete_waiting(draft)
    follow.follow_parent(draft, is_suspended=True)
    finish.close_run(draft)
    finish.delete_children(draft)
