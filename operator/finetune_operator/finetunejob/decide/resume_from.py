"""`checkpoint.resumeFrom`: which checkpoints a job starts from, and whether it may carry that run on.

Of another FineTuneJob they are known when it has stopped for good or for now: until then it writes and deletes them. Only the
pods see the storage, so a job that has finished counts as having checkpoints once an attempt of it has run.
"""

from __future__ import annotations

from finetune_crds import JobRecipe, contract
from finetune_crds.checkpoint import ResumeFrom
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.continuation import differences, settings
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import ResumedFrom
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import Refusal, Wait, refuse, wait
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.policy.result import Continue, Outcome


def job_to_look_at(ftj: FineTuneJob) -> str | None:
    """The FineTuneJob whose checkpoints a job waits for; None where it waits for none."""
    wanted = _wanted(ftj)
    if wanted is None or ftj.status.resumed_from or ftj.is_finished or ftj.deleting:
        return None
    return wanted.name if ftj.spec and not ftj.spec.suspend else None


def resume_from(draft: Draft) -> Outcome:
    """End the pass until the checkpoints are known that the job starts from. What was found once stays."""
    wanted = _wanted(draft.ftj)
    if wanted is None or draft.status.resumed_from or draft.spec.suspend:
        return Continue
    found = ResumedFrom(uri=wanted.uri) if wanted.uri else _of_job(draft, wanted.name or "")
    if isinstance(found, Refusal):
        return refuse(draft, ConditionType.CHECKPOINT_FOUND, found)
    if isinstance(found, Wait):
        return wait(draft, ConditionType.CHECKPOINT_FOUND, found)
    draft.update(resumed_from=found)
    whose = (
        f"that FineTuneJob {found.job} wrote to"
        if found.job
        else "in the folder that checkpoint.resumeFrom names:"
    )
    message = f"the job starts from the newest complete checkpoint {whose} {found.uri}"
    if contract.checkpoint_place(found.uri)[1] is not None:
        message = f"the job starts from the checkpoint that checkpoint.resumeFrom names: {found.uri}"
    draft.set(ConditionType.CHECKPOINT_FOUND, True, ConditionReason.CHECKPOINT_FOUND, message)
    return Continue


def _wanted(ftj: FineTuneJob) -> ResumeFrom | None:
    return ftj.spec.checkpoint.resume_from if ftj.spec and ftj.spec.checkpoint else None


def _of_job(draft: Draft, name: str) -> ResumedFrom | Wait | Refusal:
    """The checkpoints of a FineTuneJob, or why they are not known."""
    seen, who = draft.observed.resumed, f"FineTuneJob {name}"
    other = seen.job if seen else None
    if seen is None or other is None:
        message = f"{who} of checkpoint.resumeFrom does not exist: this job starts when it exists and has a checkpoint"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    if other.spec is None:
        message = f"this version of the operator cannot read the spec of {who} ({other.invalid})"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    mistake = _mistake(draft.ftj, other.spec, other, who)
    if mistake:
        return Refusal(ConditionReason.INVALID_SPEC, mistake)
    if not _is_at_rest(other) or seen.pods:
        message = f"{who} still runs: this job starts from its newest checkpoint when it has finished or is suspended"
        return Wait(ConditionReason.WAITING_FOR_JOB, message)
    lacking = _lack_of_checkpoints(other, who)
    if lacking:
        return lacking
    place = other.spec.checkpoint.uri if other.spec.checkpoint else ""
    uri = contract.checkpoint_folder(place, namespace=other.namespace, name=other.name, uid=other.uid)
    return ResumedFrom(uri=uri, job=name)


def _lack_of_checkpoints(other: FineTuneJob, who: str) -> Wait | Refusal | None:
    """Why a job that is at rest has no checkpoint; None where it may have some."""
    if other.status.checkpoint or (other.is_finished and other.status.attempt):
        return None
    if other.is_finished:
        message = f"{who} ended before it trained, so it has no checkpoint: remove checkpoint.resumeFrom"
        return Refusal(ConditionReason.INVALID_SPEC, message)
    message = f"{who} has no checkpoint yet: this job starts when it has one"
    return Wait(ConditionReason.WAITING_FOR_CHECKPOINT, message)


def _is_at_rest(ftj: FineTuneJob) -> bool:
    return ftj.is_finished or ftj.holds(ConditionType.SUSPENDED)


def _mistake(ftj: FineTuneJob, spec: FineTuneJobSpec, other: FineTuneJob, who: str) -> str | None:
    """Why a job can never carry another one on, whose spec this is; None where it can."""
    if spec.trainer.command:
        return (
            f"{who} runs a command of its own, and its checkpoints are not those of the built-in loop: remove "
            "checkpoint.resumeFrom"
        )
    if spec.checkpoint is None or not spec.checkpoint.uri:
        return (
            f"{who} has no checkpoints: spec.checkpoint is not set there: remove checkpoint.resumeFrom here"
        )
    wrong = differences(settings(_recipe(other)), _recipe(ftj))
    if not wrong:
        return None
    return (
        f"this job cannot carry on {who}, whose run has other settings ({'; '.join(wrong)}): create it with those, or "
        "without checkpoint.resumeFrom"
    )


def _recipe(ftj: FineTuneJob) -> JobRecipe:
    if ftj.spec is None:
        raise ValueError(f"the spec of {ftj.key} was not accepted")
    return JobRecipe.of(ftj.reference, ftj.spec)
