"""The Jobs of gates: which of them must exist, and their results.

A Job runs once for each version and digest of its gate: its name follows from both, and its result stays in the status. Jobs that are no
longer needed are deleted while they run. Jobs that have ended are deleted some time later, after their result is in the status.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.gates import Gate, JobGate
from finetune_crds.promotion_status import MAX_GATE_RESULTS, GateResult
from finetune_operator import names
from finetune_operator.batch.state import has_ended, is_being_deleted
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.gate_result import build_result
from finetune_operator.modelpromotion.decide.job_state import (
    close_run,
    describe_unfinished,
    find_job,
    is_conclusive,
)
from finetune_operator.modelpromotion.decide.measurement import Measurement
from finetune_operator.modelpromotion.model import (
    JobRun,
    ReleaseJob,
    StartJob,
    StopJob,
)
from finetune_operator.modelpromotion.pods.gate_pod import build_job
from finetune_operator.policy.result import Continue, Outcome
from finetune_operator.registry.base import ModelVersion


class _NeededJob(NamedTuple):
    """A Job that a gate needs for a version."""

    gate: Gate
    job: JobGate
    version: ModelVersion
    digest: str
    name: str


def record_results(draft: Draft) -> Outcome:
    """Record the results of needed Jobs that have ended, after their MLflow runs are closed. Always continues the pass."""
    for needed in _list_needed(draft):
        job = find_job(draft, needed.name)
        if _find_result(draft, needed) or job is None or not is_conclusive(job):
            continue
        if close_run(draft, job):
            # The result is recorded once the run is closed, so that a crash in between leaves no open run.
            continue
        result = build_result(
            job,
            needed.job,
            version=needed.version.version,
            digest=needed.digest,
            used_numbers=_list_used_numbers(draft, needed.gate.name),
            now=draft.now,
        )
        _keep_result(draft, result)
    return Continue


def find_measurement(draft: Draft, gate_name: str, version: ModelVersion) -> Measurement:
    """What the Job of a gate says about a version."""
    gate = next(item for item in draft.spec.gates if item.name == gate_name)
    needed = _need(draft, gate, version)
    result = _find_result(draft, needed)
    if result:
        return Measurement(result.job, result)
    job = find_job(draft, needed.name)
    if job is None:
        pending = f"Job {needed.name} for version {version.version} is being created"
        return Measurement(needed.name, None, pending, is_in_progress=True)
    unfinished = describe_unfinished(job, f"Job {job.name} for version {version.version}")
    return Measurement(job.name, None, unfinished.message, is_in_progress=unfinished.is_in_progress)


def start_missing(draft: Draft) -> bool:
    """Create the needed Jobs that do not exist and have no result. Returns whether there are any."""
    missing = [
        needed
        for needed in _list_needed(draft)
        if _find_result(draft, needed) is None and find_job(draft, needed.name) is None
    ]
    draft.actions += [StartJob(_build_body(draft, needed), _build_run(draft, needed)) for needed in missing]
    return bool(missing)


def has_job_in_progress(draft: Draft) -> bool:
    """Whether a needed Job is created, starts or runs."""
    return any(
        find_measurement(draft, item.gate.name, item.version).is_in_progress for item in _list_needed(draft)
    )


def tidy(draft: Draft) -> None:
    """Stop the running Jobs that are not needed, and let Kubernetes delete those that have ended and whose result is not missing."""
    needed_names = {needed.name for needed in _list_needed(draft)}
    recorded_names = {result.job for result in draft.status.gate_results}
    for job in draft.observed.child_jobs:
        if job.component != names.GATE or is_being_deleted(job.body):
            continue
        is_needed = job.name in needed_names
        if not has_ended(job.body):
            if not is_needed:
                draft.actions.append(StopJob(job.name, job.uid, job.run_id))
        elif not job.is_released and (job.name in recorded_names or not is_needed):
            draft.actions.append(ReleaseJob(job.name, job.uid))


def _list_needed(draft: Draft) -> list[_NeededJob]:
    """The Jobs whose results decide about the candidate; none if nothing is to be decided.

    The version with the alias is measured too, for comparisons. While somebody else has moved the alias, that is the version that the
    promotion moves it back to.
    """
    spec, status = draft.spec, draft.status
    candidate = status.candidate
    record = status.find_record(candidate)
    is_withheld = record is not None and record.is_withheld
    if spec.suspend or spec.rollback_to or is_withheld or candidate in (None, status.promoted):
        return []
    return [*_list_needed_for(draft, {candidate}, {draft.holder, status.promoted})]


def _list_needed_for(
    draft: Draft, candidates: set[str | None], baselines: set[str | None]
) -> Iterator[_NeededJob]:
    compared = {gate.comparison.job for gate in draft.spec.gates if gate.comparison}
    for gate in draft.spec.gates:
        if gate.job is None:
            continue
        versions = candidates | baselines if gate.name in compared else candidates
        for number in sorted(version for version in versions if version is not None):
            version = draft.observed.versions.get(number)
            if version is not None:
                yield _need(draft, gate, version)


def _need(draft: Draft, gate: Gate, version: ModelVersion) -> _NeededJob:
    """The Job of a gate for a version.

    Raises:
        ValueError: the gate has another type.
    """
    if gate.job is None:
        raise ValueError(f"gate {gate.name} has no Job")
    content = gate.job.to_json()
    # NB: a version of another registry may have the same number, but was created at another time.
    identity = [draft.promotion.uid, version.version, str(version.created), content]
    name = names.gate_job_name(draft.promotion.name, digest(identity))
    return _NeededJob(gate, gate.job, version, digest(content), name)


def _list_used_numbers(draft: Draft, gate_name: str) -> set[str]:
    """The names of the numbers that gates use of a gate's Job."""
    gates = [gate for gate in draft.spec.gates if gate.job_name == gate_name]
    return {gate.metric.name for gate in gates if gate.metric} | {
        gate.comparison.metric for gate in gates if gate.comparison
    }


def _find_result(draft: Draft, needed: _NeededJob) -> GateResult | None:
    key = (needed.version.version, needed.digest)
    return next((item for item in draft.status.gate_results if (item.version, item.digest) == key), None)


def _keep_result(draft: Draft, result: GateResult) -> None:
    """Add a result to the status, newest first. If there are too many, the oldest one that is not needed is dropped."""
    needed_keys = {(item.version.version, item.digest) for item in _list_needed(draft)}
    results = [result, *draft.status.gate_results]
    while len(results) > MAX_GATE_RESULTS:
        unneeded = [item for item in results if (item.version, item.digest) not in needed_keys]
        results.remove((unneeded or results)[-1])
    draft.update(gate_results=results)


def _build_body(draft: Draft, needed: _NeededJob) -> Json:
    return build_job(
        draft.promotion,
        draft.spec,
        draft.settings,
        gate=needed.job,
        version=needed.version.version,
        name=needed.name,
    )


def _build_run(draft: Draft, needed: _NeededJob) -> JobRun | None:
    """The MLflow run of a Job; None without an MLflow server."""
    promotion, tracking = draft.promotion, draft.spec.tracking
    server, _registry = draft.settings.servers(tracking)
    if not server:
        return None
    key = f"{promotion.uid}/{needed.name}"
    tags: Mapping[str, str] = {
        contract.TAG_GATE_JOB: key,
        contract.TAG_PROMOTION: promotion.key,
        contract.TAG_JUDGED_MODEL: draft.spec.model,
        contract.TAG_JUDGED_VERSION: needed.version.version,
    }
    experiment = names.default_experiment(
        promotion.namespace, on_databricks=draft.settings.on_databricks(tracking)
    )
    return JobRun(contract.TAG_GATE_JOB, key, experiment, needed.name, tags)
