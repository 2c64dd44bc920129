"""The policies of a job. `decide` is pure: no I/O and no clock; the same input gives the same decision."""

from __future__ import annotations

from datetime import datetime

from finetune_crds.conditions import ConditionType
from finetune_operator.finetunejob.decide import (
    accept,
    checkout,
    deadline,
    dry_run,
    evaluate,
    finish,
    links,
    progress,
    ready,
    record,
    register,
    resolve_alias,
    resume_from,
    suspend,
    sweep,
    track,
    train,
    usage,
    version,
)
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import POLL_SECONDS
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.finetunejob.preparation import backends, prepare
from finetune_operator.policy.result import run_policies
from finetune_operator.settings import Settings
from finetune_operator.tenancy.model import Refusal

# The policies run in this order; a policy that returns Stop ends the pass.
POLICIES = (
    record.record_jobs,
    accept.accept,
    deadline.record_waiting,
    suspend.resume,
    checkout.resolve,
    dry_run.check_pods,
    resolve_alias.pin_versions,
    resume_from.find_checkpoints,
    track.track,
    # Ends the pass of a suspended job: of the policies below, none applies to it.
    suspend.suspend,
    deadline.enforce_deadline,
    prepare.prepare,
    finish.end_if_unchanged,
    train.train,
    version.await_version,
    evaluate.evaluate,
    register.register,
    finish.succeed,
)


def decide(ftj: FineTuneJob, observed: Observed, now: datetime, settings: Settings) -> Decision:
    """Decide what to do for a job, and its new status."""
    draft = Draft(ftj, observed, now.replace(microsecond=0), settings)
    if observed.refusal:
        return _refuse(draft, observed.refusal)
    if ftj.spec and ftj.spec.sweep:
        return _decide_sweep(draft)
    if not finish.is_finished(draft):
        run_policies(POLICIES, draft)
        usage.record_usage(draft, final=finish.is_finished(draft))
        links.record_links(draft)
        progress.clear_eta(draft)
        progress.show_preparation(draft)
    # Also a job that a policy has finished in this pass.
    if finish.is_finished(draft):
        finish.clean_up(draft)
    backends.set_finalizer(draft)
    draft.status = ready.summarize_status(ftj, draft.status, draft.now)
    return draft.conclude()


def _refuse(draft: Draft, refusal: Refusal) -> Decision:
    """Decide for a job that the tenancy does not permit: report it, and leave its children as they are, unless the job is suspended."""
    if not finish.is_finished(draft):
        draft.set(ConditionType.ACCEPTED, False, refusal.reason, refusal.message)
        draft.requeue_after(POLL_SECONDS)
        if can_only_stop(draft.ftj):
            run_policies((sweep.follow.suspend if draft.spec.sweep else suspend.suspend,), draft)
        elif draft.status.suspend_time:
            message = "the job resumes as soon as it is permitted"
            draft.set(ConditionType.SUSPENDED, False, refusal.reason, message)
    draft.status = ready.summarize_status(draft.ftj, draft.status, draft.now)
    return draft.conclude()


def can_only_stop(ftj: FineTuneJob) -> bool:
    """Whether a job that is not permitted any longer is suspended: the operator then stops what it started for the job before."""
    return ftj.spec is not None and ftj.spec.suspend and ftj.status.resolved is not None


def _decide_sweep(draft: Draft) -> Decision:
    """Decide for a job with a sweep, whose FineTuneJobs do the work."""
    if not finish.is_finished(draft):
        run_policies(sweep.POLICIES, draft)
        links.record_links(draft)
    if finish.is_finished(draft):
        sweep.clean_up(draft)
    draft.status = ready.summarize_status(draft.ftj, draft.status, draft.now)
    return draft.conclude()


def decide_deletion(ftj: FineTuneJob, observed: Observed, now: datetime, settings: Settings) -> Decision:
    """Decide what to do for a job that is being deleted and has the operator's finalizer."""
    draft = Draft(ftj, observed, now.replace(microsecond=0), settings)
    backends.release(draft)
    draft.status = ready.summarize_status(ftj, draft.status, draft.now)
    return draft.conclude()
