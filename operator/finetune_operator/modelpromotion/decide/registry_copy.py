"""The copy of a version of another registry: whether its Job must run, and how it ended.

The registry itself says whether there is a copy: the copy has the identity of the source's version as a tag, and gets it when all of its files
are there. So an operator that was down, or lost the status, makes no second copy. A Job that failed stays, and says so, until somebody
deletes it or the spec changes.
"""

from __future__ import annotations

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import TerminationMessage
from finetune_crds.modelpromotion import DEFAULT_COPY_TIMEOUT_SECONDS, SourceRegistry
from finetune_crds.pods import MAIN_CONTAINER
from finetune_crds.promotion_status import CopyStatus
from finetune_operator import names
from finetune_operator.batch.state import describe_pods, has_ended, is_being_deleted, job_condition
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.job_end import (
    build_log_command,
    describe_exit,
    describe_failure,
    find_last_pod,
    find_termination,
    has_exceeded_deadline,
    quote_end,
)
from finetune_operator.modelpromotion.decide.job_state import (
    close_run,
    describe_unfinished,
    find_job,
    is_conclusive,
)
from finetune_operator.modelpromotion.model import (
    JobRun,
    ObservedJob,
    ReleaseJob,
    SourceVersion,
    StartJob,
    StopJob,
)
from finetune_operator.modelpromotion.pods.copy_pod import build_job
from finetune_operator.text import normalize_address

# The pod has two containers with a log.
_LOG_OPTIONS = " --all-containers"

Wait = tuple[ConditionReason, str]


def describe_source(source: SourceRegistry) -> str:
    """The version that the source names, for messages."""
    version = f"alias {source.alias}" if source.alias else f"version {source.version}"
    return f"{version} of {source.model} at {normalize_address(source.uri)}"


def follow_copy(draft: Draft, source: SourceRegistry | None) -> Wait | None:
    """Record the source's version, and start its copy if there is none.

    Returns:
        Why there is no copy yet; None if there is one, or if the source is no other registry.
    """
    if source is None:
        draft.update(copied=None)
        return None
    version = draft.observed.source_version or SourceVersion()
    if version.problem:
        return (
            ConditionReason.SOURCE_UNREADABLE,
            f"{describe_source(source)} cannot be read: {version.problem.message}",
        )
    if version.number is None:
        reason = ConditionReason.WAITING_FOR_ALIAS if source.alias else ConditionReason.WAITING_FOR_VERSION
        return reason, f"there is no {describe_source(source)} yet"
    draft.update(
        copied=CopyStatus(
            uri=normalize_address(source.uri),
            model=source.model,
            source_version=version.number,
            digest=version.digest,
            version=version.copy,
        )
    )
    return None if version.copy else _await_copy(draft, source, version)


def _await_copy(draft: Draft, source: SourceRegistry, version: SourceVersion) -> Wait:
    """Start the copy if it can be made now. Returns why there is none yet."""
    what = _describe_version(source, version)
    if not version.is_ready:
        return ConditionReason.WAITING_FOR_VERSION, f"{what} is not ready yet"
    if draft.spec.rollback_to:
        return ConditionReason.COPYING, f"{what} is copied when spec.rollbackTo is removed"
    return _follow_job(draft, source, version, what)


def forget_copy(draft: Draft) -> None:
    """Forget a copy that somebody deleted, so that the next pass looks for another one."""
    if draft.status.copied:
        draft.update(copied=None)
        draft.requeue_after(0)


def tidy(draft: Draft) -> None:
    """Stop the running Jobs that are not needed, and let Kubernetes delete those that made the copy or are not needed.

    NB: the version is complete shortly before the Job ends, which then only closes its MLflow run.
    """
    name = _find_current_name(draft)
    is_copied = draft.observed.source_version is not None and draft.observed.source_version.copy is not None
    for job in draft.observed.child_jobs:
        is_current = job.name == name
        if job.component != names.COPY or is_being_deleted(job.body) or (is_current and not is_copied):
            continue
        if not has_ended(job.body):
            if not is_current:
                draft.actions.append(StopJob(job.name, job.uid, job.run_id))
        elif not job.is_released and not close_run(draft, job):
            # NB: after the run was closed. Without the Job, nobody would know it any more.
            draft.actions.append(ReleaseJob(job.name, job.uid))


def _find_current_name(draft: Draft) -> str | None:
    """The name of the Job that copies the version which the source names; None if no copy is needed."""
    source, version = draft.spec.source.registry, draft.observed.source_version
    if source is None or version is None or draft.spec.rollback_to:
        return None
    # While the source cannot be read, the copy of its last version goes on.
    identity = draft.status.copied.digest if version.problem and draft.status.copied else version.digest
    return _name_job(draft, source, identity) if identity else None


def _name_job(draft: Draft, source: SourceRegistry, identity: str) -> str:
    """The name of the Job that copies a version. It changes with all that the Job depends on, so a changed spec tries again."""
    spec = draft.spec
    # NB: which version an alias names is in the identity. Where else it is named does not change the copy.
    settings = source.model_copy(update={"version": None, "alias": None}).to_json()
    content = [draft.promotion.uid, identity, settings, spec.tracking.to_json(), spec.model]
    return names.copy_job_name(draft.promotion.name, digest(content))


def _describe_version(source: SourceRegistry, version: SourceVersion) -> str:
    return f"version {version.number} of {source.model} at {normalize_address(source.uri)}"


def _follow_job(draft: Draft, source: SourceRegistry, version: SourceVersion, what: str) -> Wait:
    """Create the Job, or report what it does or why it failed."""
    name = _name_job(draft, source, version.digest)
    job = find_job(draft, name)
    if job is None:
        draft.actions.append(_start(draft, source, version, name))
        return _keep_refusal(draft) or (
            ConditionReason.COPYING,
            f"Job {name}, which copies {what}, is being created",
        )
    if is_conclusive(job):
        close_run(draft, job)
        return ConditionReason.COPY_FAILED, _explain_end(draft, source, job, what)
    unfinished = describe_unfinished(job, f"Job {name}, which copies {what},", log_options=_LOG_OPTIONS)
    reason = ConditionReason.COPYING if unfinished.is_in_progress else ConditionReason.COPY_NOT_STARTED
    return reason, unfinished.message


def _keep_refusal(draft: Draft) -> Wait | None:
    """Why the Job could not be created in the last pass; None if it could.

    NB: otherwise, each pass would first report that the Job is created, and then the same failure again, and so write the status twice.
    """
    condition = draft.condition(ConditionType.SOURCE_READY)
    if condition is None or condition.reason != ConditionReason.COPY_NOT_STARTED:
        return None
    return ConditionReason.COPY_NOT_STARTED, condition.message


def _start(draft: Draft, source: SourceRegistry, version: SourceVersion, name: str) -> StartJob:
    promotion, tracking = draft.promotion, draft.spec.tracking
    number = version.number or ""
    body = build_job(
        promotion,
        draft.spec,
        draft.settings,
        source=source,
        version=number,
        identity=version.digest,
        name=name,
    )
    experiment = names.default_experiment(
        promotion.namespace, on_databricks=draft.settings.on_databricks(tracking)
    )
    # NB: the same run for each Job that copies the version, so that a Job finds what an earlier one has uploaded.
    key = f"{promotion.uid}/{version.digest}"
    tags = {
        contract.TAG_COPY_JOB: key,
        contract.TAG_PROMOTION: promotion.key,
        contract.TAG_COPIED_FROM: normalize_address(source.uri),
        contract.TAG_COPIED_MODEL: source.model,
        contract.TAG_COPIED_VERSION: number,
    }
    return StartJob(body, JobRun(contract.TAG_COPY_JOB, key, experiment, name, tags))


def _explain_end(draft: Draft, source: SourceRegistry, job: ObservedJob, what: str) -> str:
    """Explain why a Job that ended made no copy."""
    again = f"correct this and delete Job {job.name} to copy again, or change spec.source"
    if job_condition(job.body, "Complete"):
        return (
            f"Job {job.name} copied {what}, but {draft.spec.model} has no version with its tag {contract.TAG_COPY}: somebody deleted the "
            f"version or the tag: delete Job {job.name} to copy again, or change spec.source"
        )
    pod, log = find_last_pod(job.pods), f"see {build_log_command(job, _LOG_OPTIONS)}"
    if has_exceeded_deadline(pod):
        limit = source.timeout_seconds or DEFAULT_COPY_TIMEOUT_SECONDS
        return f"{what} cannot be copied: {describe_pods([pod])} did not end within {limit} s: raise spec.source.registry.timeoutSeconds; {log}"
    ends = (find_termination(pod, container) for container in (names.DOWNLOAD_CONTAINER, MAIN_CONTAINER))
    terminated = next((end for end in ends if end.get("exitCode")), None)
    if terminated is None:
        return f"{what} cannot be copied: {describe_failure(job, pod)}: {again}"
    message = TerminationMessage.parse(terminated.get("message"))
    if message and message.error:
        return f"{what} cannot be copied: {message.error.message}: {again}"
    return f"{what} cannot be copied ({describe_exit(terminated)}), {log}: {again}{quote_end(terminated)}"
