"""The data of a pass over a FineTuneJob: the resource and the observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from finetune_crds import JobReference
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.databricks.model import Run as DatabricksRun
from finetune_operator.errors import Problem
from finetune_operator.mlflow.model import Run
from finetune_operator.owners import Owner
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.tenancy.model import Refusal

FINISHED_PHASES = ("Succeeded", "Failed")
"""The phases of a job that has ended."""


@dataclass(frozen=True)
class FineTuneJob:
    """A FineTuneJob as the API server stores it.

    `spec` includes the defaults of the chart, `written` is the spec without them. Both are None when the spec does not fit
    this version's schema; `invalid` then has the reason. `version` is the resource version. `created` is the creation time, which the API
    server always sets.
    """

    name: str
    namespace: str
    uid: str
    version: str
    generation: int
    spec: FineTuneJobSpec | None
    status: FineTuneJobStatus
    written: FineTuneJobSpec | None = None
    invalid: str | None = None
    finalizers: tuple[str, ...] = ()
    deleting: bool = False
    created: datetime | None = None
    trained_data: str | None = None
    """The digest of the data that the last job of its FineTuneSchedule trained on, if the job is to end with the same data."""
    sweep: Owner | None = None
    """The FineTuneJob with the sweep that created this one; None if this one is no trial."""

    @property
    def is_finished(self) -> bool:
        """Whether the job has succeeded or failed permanently."""
        return self.holds(ConditionType.SUCCEEDED) or self.holds(ConditionType.FAILED)

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition of its status is True."""
        return any(item.type == kind and item.status == "True" for item in self.status.conditions)

    @property
    def has_requested_run(self) -> bool:
        """Whether the status names the MLflow run, or records why it could not be created."""
        is_reported = any(item.type == ConditionType.TRACKED for item in self.status.conditions)
        return is_reported or self.status.run_id is not None

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> JobReference:
        """The reference to this job in its recipes."""
        created = {} if self.created is None else {"created": self.created.astimezone(UTC).date()}
        return JobReference(name=self.name, namespace=self.namespace, uid=self.uid, **created)


def has_open_run(status: FineTuneJobStatus) -> bool:
    """Whether a status names an MLflow run and does not record that the run was closed."""
    is_closed = any(
        item.type == ConditionType.TRACKED and item.reason == ConditionReason.RUN_FINISHED
        for item in status.conditions
    )
    return status.run_id is not None and not is_closed


def find_run_status(status: FineTuneJobStatus) -> str:
    """The status with which the MLflow run of a job is closed.

    NB: the run of a job that trained nothing is not FINISHED: people compare the runs that are.
    """
    ends = {item.type: item for item in status.conditions if item.status == "True"}
    succeeded = ends.get(ConditionType.SUCCEEDED)
    if succeeded and succeeded.reason != ConditionReason.DATA_UNCHANGED:
        return "FINISHED"
    return "FAILED" if ConditionType.FAILED in ends else "KILLED"


@dataclass(frozen=True)
class Mlflow:
    """A job's run and version in MLflow, and the address of the server. When `problem` is set, the other fields are empty."""

    run: Run | None = None
    version: RegisteredVersion | None = None
    problem: Problem | None = None
    server: str = field(default="", compare=False)

    @property
    def writable_run(self) -> Run | None:
        """The run if it can be written to; None if it does not exist or was deleted."""
        return self.run if self.run and not self.run.is_deleted else None


@dataclass(frozen=True)
class Preparation:
    """The Databricks run of a preparation; `problem` has the reason why it cannot be read."""

    run: DatabricksRun | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class CustomChildren:
    """A preparation's children other than Jobs: objects of another operator's kind, by name, and pods that the FineTuneJob controls.

    `problem` has the reason why they cannot be read.
    """

    by_name: Mapping[str, Json] = field(default_factory=dict)
    pods: tuple[Json, ...] = ()
    problem: Problem | None = None


@dataclass(frozen=True)
class PreparationLease:
    """The Lease of a preparation, and the FineTuneJob that holds it; each is None if it does not exist."""

    lease: Json | None = None
    holder: Json | None = None


@dataclass(frozen=True)
class ResumedJob:
    """The FineTuneJob that checkpoint.resumeFrom names (None if it does not exist), and how many of its pods may still run."""

    job: FineTuneJob | None = None
    pods: int = 0


@dataclass(frozen=True)
class AliasVersion:
    """The version that an alias points to, if any. `exists`: whether the model exists. `problem`: why it cannot be read."""

    exists: bool = False
    version: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class ResolvedRevision:
    """The commit of trainer.code.git, and the branch if the revision is one; `problem` has the reason why it cannot be resolved.

    `retry_seconds`: seconds until the next request after a problem.
    """

    commit: str = ""
    branch: str | None = None
    problem: Problem | None = None
    retry_seconds: float | None = None


@dataclass(frozen=True)
class PodEvent:
    """An Event about a pod, with the time when it last occurred."""

    reason: str
    message: str
    at: datetime


@dataclass(frozen=True)
class QueueState:
    """The state of a Job in a queue of Kueue.

    Attributes:
        installed: whether the cluster has Kueue's Workloads.
        workload: whether Kueue has created a Workload for the Job.
        admitted: whether that Workload is admitted.
        reason: why it is not admitted, as Kueue's reason; empty before Kueue has looked at it.
        message: why it is not admitted, as a sentence.
        position: position of the Workload in the queue, from 1; None if Kueue does not report it.
        read_at: when Kueue was found to have no Workload for the Job, or a little earlier; None if there is a Workload.
        eviction_reason: why Kueue last stopped the pods of the Job, as Kueue's reason; empty if it did not.
        eviction_message: the same as a sentence.
    """

    installed: bool = True
    workload: bool = True
    admitted: bool = False
    reason: str = ""
    message: str = ""
    position: int | None = None
    read_at: datetime | None = None
    eviction_reason: str = ""
    eviction_message: str = ""


# Results of a dry run that keep the job from starting. Each may end without a change of the spec: by a change of a policy, of the
# installation or of a webhook.
BLOCKING_REASONS: tuple[str, ...] = (
    ConditionReason.POD_REJECTED,
    ConditionReason.POD_TEMPLATE_INVALID,
    ConditionReason.EXECUTORS_FORBIDDEN,
    ConditionReason.CHECK_FAILED,
    ConditionReason.QUEUE_INADMISSIBLE,
)


@dataclass(frozen=True)
class DryRunAnswer:
    """The API server's answer to the dry runs: a condition without its type and times.

    `admitted`: the status of the condition; None for Unknown. `retry_seconds`: seconds until the dry run is repeated; None for never.
    `component`: whose pod or Job the answer is about.
    """

    admitted: bool | None
    reason: ConditionReason
    message: str
    retry_seconds: float | None = None
    component: str = names.TRAIN


@dataclass(frozen=True)
class Observed:
    """The observed state of a job.

    Attributes:
        jobs: child Jobs by name.
        pods: pods of these Jobs and, after them, pods that ended and no longer exist.
        companions: kind and name of the job's Services, ConfigMaps and NetworkPolicies; None if they are not known.
        mlflow: run and version in MLflow.
        rejections: by Job name, why the API server refused to create its pods.
        promoted_aliases: namespace/name of the ModelPromotion that manages an alias of the job's registered model, by alias.
        pod_events: Events about waiting pods, oldest first, by pod name.
        queue_state: Kueue's state of the suspended Job; None if no Job is suspended, or Kueue cannot be read.
        node_labels: labels of the nodes that were read, by node.
        offered_resources: resources that at least one node offers; None if no pod waits for a GPU, or nodes cannot be read.
        dry_run_answer: answer to the dry runs that the decision requested.
        has_checked_pods: whether dry runs were made for this generation of the job since the operator was started.
        executors: pods of Spark's executors, while the preparation runs.
        preparation: the Databricks run that the status names, while it is followed.
        custom_children: objects of another operator's kind, such as SparkApplications, until the preparation is complete.
        lease: Lease of the preparation that the job is about to begin; None if it shares no preparation.
        prepared_trial: the first trial of the same sweep that has prepared the data which this trial is about to prepare.
        resumed: the job that checkpoint.resumeFrom names, until its checkpoints are known.
        alias_versions: by the field of `status.pinned`, the versions that the models' aliases point at, until they are pinned.
        code: the commit of trainer.code.git, until the status has it.
        refusal: why the job must not be reconciled; then at most what its suspension stops was observed.
        children: the FineTuneJobs of the job's sweep, by name.
        suggestions: the values that the decision requested for trials, by number and field.
        evaluations: values of the sweep's metric, by the number of the trial and by step, of trials that have reached a rung or have ended.
    """

    jobs: Mapping[str, Json] = field(default_factory=dict)
    pods: tuple[Json, ...] = ()
    companions: frozenset[tuple[str, str]] | None = None
    mlflow: Mlflow | None = None
    rejections: Mapping[str, str] = field(default_factory=dict)
    promoted_aliases: Mapping[str, str] = field(default_factory=dict)
    pod_events: Mapping[str, tuple[PodEvent, ...]] = field(default_factory=dict)
    queue_state: QueueState | None = None
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    offered_resources: frozenset[str] | None = None
    dry_run_answer: DryRunAnswer | None = None
    has_checked_pods: bool = True
    executors: tuple[Json, ...] = ()
    preparation: Preparation | None = None
    custom_children: CustomChildren | None = None
    lease: PreparationLease | None = None
    prepared_trial: Json | None = None
    resumed: ResumedJob | None = None
    alias_versions: Mapping[str, AliasVersion] = field(default_factory=dict)
    code: ResolvedRevision | None = None
    refusal: Refusal | None = None
    children: Mapping[str, Json] = field(default_factory=dict)
    suggestions: Mapping[str, Json] | None = None
    evaluations: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
