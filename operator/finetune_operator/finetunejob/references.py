"""The references of a spec to objects outside the job: aliases of models, the revision of a repository, another job's checkpoints.

Each reference is resolved once and recorded in the status: observers resolve those that the status lacks, and policies wait for them.
"""

from __future__ import annotations

from finetune_crds.aliased import Aliased
from finetune_crds.checkpoint import ResumeFrom
from finetune_crds.code import FULL_COMMIT, Git
from finetune_crds.conditions import ConditionType
from finetune_operator.finetunejob.model import FineTuneJob


def is_unpinned(ftj: FineTuneJob) -> bool:
    """Whether a job, suspended or not, still lacks versions for its aliases. It gets no MLflow run before it has them."""
    return bool(unpinned_aliases(ftj))


def unpinned_aliases(ftj: FineTuneJob) -> dict[str, Aliased]:
    """The aliases whose versions a job lacks, by the field of `status.pinned`.

    A job that has finished or is being deleted needs none. A job that has started lacks none: its aliases were pinned, or its pods resolved
    them, as in earlier versions of the operator.
    """
    if ftj.spec is None or ftj.is_finished or ftj.deleting or ftj.status.start_time:
        return {}
    model, distillation = ftj.spec.model, ftj.spec.objective.distillation
    # NB: in `spec`, the version has replaced each alias that is pinned.
    uris = {"base": model.base if model else None, "teacher": distillation.teacher if distillation else None}
    return {field: aliased for field, uri in uris.items() if (aliased := Aliased.parse(uri))}


def aliases_to_resolve(ftj: FineTuneJob) -> dict[str, Aliased]:
    """The aliases to resolve, by the field of `status.pinned`; empty while the job does not run.

    NB: only for an accepted job: `accept` refuses a registry address that contains a password.
    """
    if ftj.spec is None or ftj.spec.suspend or not ftj.holds(ConditionType.ACCEPTED):
        return {}
    return unpinned_aliases(ftj)


def resume_from(ftj: FineTuneJob) -> ResumeFrom | None:
    """checkpoint.resumeFrom, if the job has it."""
    return ftj.spec.checkpoint.resume_from if ftj.spec and ftj.spec.checkpoint else None


def resumed_job_name(ftj: FineTuneJob) -> str | None:
    """The FineTuneJob whose checkpoints a job waits for; None if it does not wait."""
    reference = resume_from(ftj)
    if reference is None or ftj.status.resumed_from or ftj.is_finished or ftj.deleting:
        return None
    return reference.name if ftj.spec and not ftj.spec.suspend else None


def repository(ftj: FineTuneJob) -> Git | None:
    """trainer.code.git, if the job has it."""
    return ftj.spec.trainer.code.git if ftj.spec and ftj.spec.trainer.code else None


def repository_to_resolve(ftj: FineTuneJob) -> Git | None:
    """The repository whose revision must be resolved.

    None without a repository, if the commit is known, or if the job is not accepted, has finished or is being deleted.
    """
    git = repository(ftj)
    if git is None or ftj.status.code or ftj.is_finished or ftj.deleting:
        return None
    if not ftj.holds(ConditionType.ACCEPTED):
        return None
    return None if FULL_COMMIT.fullmatch(git.revision) else git
