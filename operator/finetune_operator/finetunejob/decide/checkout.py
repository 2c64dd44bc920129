"""`trainer.code.git`: which commit the job runs. The commit is resolved once, before any child is created, and every attempt runs it."""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.code import FULL_COMMIT, CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.draft.wait import POLL_SECONDS, SOON_SECONDS
from finetune_operator.finetunejob.model import ResolvedRevision
from finetune_operator.finetunejob.references import repository
from finetune_operator.policy.result import Continue, Outcome, Stop


def resolve(draft: Draft) -> Outcome:
    """Record the commit in the status, and end each pass until it is recorded. A recorded commit does not change.

    If a pass went on without a recorded commit, a crash could leave an MLflow run or pods of one commit, and a later pass could record
    another commit.
    """
    git = repository(draft.ftj)
    if git is None or draft.status.code:
        return Continue
    revision = draft.observed.code
    if FULL_COMMIT.fullmatch(git.revision):
        revision = ResolvedRevision(git.revision.lower())
    if revision is None or revision.problem:
        if revision and revision.problem:
            draft.set(ConditionType.CODE_RESOLVED, False, revision.problem.reason, revision.problem.message)
        # The server is read outside the passes, and its answer triggers the next pass. It is read only for a job that an earlier pass
        # accepted, so a job that this pass accepted gets another pass soon.
        is_accepted = draft.ftj.holds(ConditionType.ACCEPTED)
        retry_seconds = revision.retry_seconds if revision else None
        draft.requeue_after(retry_seconds or (POLL_SECONDS if is_accepted else SOON_SECONDS))
        # A suspended job continues, to report that it is suspended. `track` creates no run while the commit is unknown.
        return Continue if draft.spec.suspend else Stop
    draft.update(code=CodeStatus(commit=revision.commit, branch=revision.branch))
    is_commit_in_spec = revision.commit == git.revision.lower()
    subject = f"{git.url} has" if is_commit_in_spec else f"{git.revision} of {git.url} is"
    message = f"{subject} commit {revision.commit}, which every attempt runs"
    draft.set(ConditionType.CODE_RESOLVED, True, ConditionReason.CODE_RESOLVED, message)
    draft.requeue_after(SOON_SECONDS)
    return Stop


def is_unresolved(draft: Draft) -> bool:
    """Whether the job waits for its commit, which its MLflow run will name."""
    return repository(draft.ftj) is not None and draft.status.code is None


def tags(draft: Draft) -> dict[str, str]:
    """The tags with which the MLflow run identifies the code."""
    git, code = repository(draft.ftj), draft.status.code
    if git is None or code is None:
        return {}
    branch = {contract.TAG_GIT_BRANCH: code.branch} if code.branch else {}
    return {contract.TAG_GIT_COMMIT: code.commit, contract.TAG_GIT_URL: git.url, **branch}
