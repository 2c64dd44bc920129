"""`checkpoint.resumeFrom`: which checkpoints a job starts from, and whether it can continue the run that wrote them.

The checkpoints of another FineTuneJob are known once it has finished or is suspended: until then, it writes and deletes checkpoints. Only
pods can read the storage, so the operator assumes that a finished job has checkpoints if it has run an attempt.
"""

from __future__ import annotations

from finetune_crds import JobRecipe, contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.continuation import differences, settings
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import ResumedFrom
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import Refusal, Wait, refuse, wait
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.references import resume_from
from finetune_operator.policy.result import Continue, Outcome


def find_checkpoints(draft: Draft) -> Outcome:
    """Record the checkpoints that the job starts from, and end each pass until they are known.

    A suspended job does not look for them. Recorded checkpoints do not change.
    """
    reference = resume_from(draft.ftj)
    if reference is None or draft.status.resumed_from or draft.spec.suspend:
        return Continue
    checkpoints = (
        ResumedFrom(uri=reference.uri) if reference.uri else _checkpoints_of_job(draft, reference.name or "")
    )
    if isinstance(checkpoints, Refusal):
        return refuse(draft, ConditionType.CHECKPOINT_FOUND, checkpoints)
    if isinstance(checkpoints, Wait):
        return wait(draft, ConditionType.CHECKPOINT_FOUND, checkpoints)
    draft.update(resumed_from=checkpoints)
    message = f"the job starts from the {_describe(checkpoints)} {checkpoints.uri}"
    draft.set(ConditionType.CHECKPOINT_FOUND, True, ConditionReason.CHECKPOINT_FOUND, message)
    return Continue


def _describe(checkpoints: ResumedFrom) -> str:
    """What the URI names: a single checkpoint, the folder of another job, or any other folder."""
    _folder, step = contract.split_checkpoint_uri(checkpoints.uri)
    if step is not None:
        return "checkpoint that checkpoint.resumeFrom names:"
    if checkpoints.job:
        return f"newest complete checkpoint that FineTuneJob {checkpoints.job} wrote to"
    return "newest complete checkpoint in the folder that checkpoint.resumeFrom names:"


def _checkpoints_of_job(draft: Draft, name: str) -> ResumedFrom | Wait | Refusal:
    """The checkpoints of a FineTuneJob, or why they are not known."""
    resumed, who = draft.observed.resumed, f"FineTuneJob {name}"
    resumed_job = resumed.job if resumed else None
    if resumed is None or resumed_job is None:
        message = f"{who} of checkpoint.resumeFrom does not exist: this job starts when it exists and has a checkpoint"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    if resumed_job.spec is None:
        message = f"this version of the operator cannot read the spec of {who} ({resumed_job.invalid})"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    mistake = _find_mistake(draft.ftj, resumed_job.spec, resumed_job, who)
    if mistake:
        return Refusal(ConditionReason.INVALID_SPEC, mistake)
    may_write = not _is_at_rest(resumed_job) or resumed.pods > 0
    if may_write:
        message = f"{who} still runs: this job starts from its newest checkpoint when it has finished or is suspended"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    missing_checkpoint = _explain_missing_checkpoint(resumed_job, who)
    if missing_checkpoint:
        return missing_checkpoint
    parent_uri = resumed_job.spec.checkpoint.uri if resumed_job.spec.checkpoint else ""
    uri = contract.job_folder(
        parent_uri, namespace=resumed_job.namespace, name=resumed_job.name, uid=resumed_job.uid
    )
    return ResumedFrom(uri=uri, job=name)


def _explain_missing_checkpoint(resumed_job: FineTuneJob, who: str) -> Wait | Refusal | None:
    """Explain why a job that is at rest has no checkpoint; None if it may have one."""
    has_run = resumed_job.is_finished and resumed_job.status.attempt
    if resumed_job.status.checkpoint or has_run:
        return None
    if resumed_job.is_finished:
        message = f"{who} ended before it trained, so it has no checkpoint: remove checkpoint.resumeFrom"
        return Refusal(ConditionReason.INVALID_SPEC, message)
    message = f"{who} has no checkpoint yet: this job starts when it has one"
    return Wait(ConditionReason.WAITING_FOR_CHECKPOINT, message)


def _is_at_rest(ftj: FineTuneJob) -> bool:
    return ftj.is_finished or ftj.holds(ConditionType.SUSPENDED)


def _find_mistake(
    ftj: FineTuneJob, resumed_spec: FineTuneJobSpec, resumed_job: FineTuneJob, who: str
) -> str | None:
    """Explain why `ftj` can never continue `resumed_job`; None if it can."""
    if resumed_spec.trainer.command:
        return (
            f"{who} runs a custom command, and the built-in loop cannot read its checkpoints: "
            "remove checkpoint.resumeFrom"
        )
    if resumed_spec.checkpoint is None or not resumed_spec.checkpoint.uri:
        return f"{who} does not set spec.checkpoint and has no checkpoints: remove checkpoint.resumeFrom from this job"
    # A checkpoint contains the same settings, and the trainer compares them with its recipe in the same way.
    resumed_settings = settings(_recipe(resumed_job))
    differing = differences(resumed_settings, _recipe(ftj))
    if not differing:
        return None
    return (
        f"this job cannot continue {who}, whose settings differ ({'; '.join(differing)}): create the job with the same "
        "settings, or without checkpoint.resumeFrom"
    )


def _recipe(ftj: FineTuneJob) -> JobRecipe:
    if ftj.spec is None:
        raise ValueError(f"the spec of {ftj.key} was not accepted")
    return JobRecipe.of(ftj.reference, ftj.spec)
