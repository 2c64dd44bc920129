"""What a pass over a FineTuneJob works on: the resource, what was observed, and what was decided."""

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
from finetune_operator.databricks.model import Submission
from finetune_operator.errors import Problem
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import RegisteredVersion


@dataclass(frozen=True)
class FineTuneJob:
    """A FineTuneJob as the API server holds it.

    `spec` is None when it does not fit this version's schema; `invalid` then says why. It has the defaults of the
    installation, and `written` has not. `version` is its resource version. `created` is None only where that does not matter.
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

    @property
    def is_finished(self) -> bool:
        """Whether the job has succeeded or failed, for good."""
        return self.holds(ConditionType.SUCCEEDED) or self.holds(ConditionType.FAILED)

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition of its status is True."""
        return any(item.type == kind and item.status == "True" for item in self.status.conditions)

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> JobReference:
        """What its recipes say of it."""
        created = {} if self.created is None else {"created": self.created.astimezone(UTC).date()}
        return JobReference(name=self.name, namespace=self.namespace, uid=self.uid, **created)


@dataclass(frozen=True)
class Mlflow:
    """A job's run and version in MLflow, and the address of the server. When `problem` is set, the other fields are empty."""

    run: Run | None = None
    version: RegisteredVersion | None = None
    problem: Problem | None = None
    server: str = field(default="", compare=False)

    @property
    def writable_run(self) -> Run | None:
        """The run if it takes metrics, tags and a status; None where it does not exist or was deleted."""
        return self.run if self.run and not self.run.is_deleted else None


@dataclass(frozen=True)
class Preparation:
    """The Databricks run of a preparation; `problem` if it cannot be read."""

    run: DatabricksRun | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class CustomChildren:
    """What prepares for a job besides Jobs: objects of another operator's kind, by name, and the pods that the job itself controls.

    `problem` if they cannot be read.
    """

    by_name: Mapping[str, Json] = field(default_factory=dict)
    pods: tuple[Json, ...] = ()
    problem: Problem | None = None


@dataclass(frozen=True)
class PreparationLease:
    """The Lease of a preparation, and the FineTuneJob that holds it; None if either does not exist."""

    lease: Json | None = None
    holder: Json | None = None


@dataclass(frozen=True)
class ResumedJob:
    """The FineTuneJob that checkpoint.resumeFrom names, None where it does not exist, and how many pods it still has."""

    job: FineTuneJob | None = None
    pods: int = 0


@dataclass(frozen=True)
class AliasVersion:
    """The version that an alias of a registered model points to, if any; `problem` if the registry cannot be read."""

    exists: bool = False
    version: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class ResolvedRevision:
    """The commit of trainer.code.git that its server reports, and the requested branch; `problem` if it cannot be resolved.

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
        installed: whether the cluster knows Kueue's Workloads.
        workload: whether Kueue has made a Workload of the Job.
        admitted: whether that Workload is admitted.
        reason: why it is not, as Kueue's one word; empty before Kueue has looked at it.
        message: the same as a sentence.
        position: its position in the queue, from 1; None when Kueue does not say.
        read_at: where there is no Workload, when that was read, or earlier.
    """

    installed: bool = True
    workload: bool = True
    admitted: bool = False
    reason: str = ""
    message: str = ""
    position: int | None = None
    read_at: datetime | None = None


# Why the pods could not be created now, and neither could their Job. It may change while the spec stays: a policy, the
# installation, a webhook.
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

    `retry_seconds`: seconds until the dry run is repeated; None for never. `component`: whose pod or Job the answer is about.
    """

    admitted: bool | None
    reason: ConditionReason
    message: str
    retry_seconds: float | None = None
    component: str = names.TRAIN


@dataclass(frozen=True)
class Observed:
    """What exists: the job's child Jobs by name, its pods, and its run and version in MLflow.

    `rejections` are the messages of Jobs whose pods the API server refused to create, by Job name. `promoted_aliases` are the
    aliases of the job's registered model that a ModelPromotion keeps: namespace/name of it, by alias. `pod_events` are
    the Events about pods that wait, the oldest first, by pod name. `queue_state` is what Kueue says of the suspended Job;
    None when none is suspended, or Kueue cannot be read. `node_labels` are labels by node, as far as nodes were read.
    `offered_resources` are the resources that any node offers, where a pod waits for a GPU; None where that is not known.
    `dry_run_answer` is the answer to the dry runs that the decision asked for. `executors` are the pods of Spark's executors
    while it runs. `preparation` is the Databricks run that the status names, while it is followed. `custom_children` are the
    objects of a kind of another operator, such as SparkApplications, of a preparation that has them, until it is complete. `lease` is that of the preparation that the job is
    about to begin; None where nothing is shared with other jobs. `resumed` is the job that checkpoint.resumeFrom names, until its
    checkpoints are known. `alias_versions` are the versions that the aliases of the job's models point at, by the field of
    `status.pinned`, until they are pinned. `code` is the commit of trainer.code.git, until the status has it.
    """

    jobs: Mapping[str, Json] = field(default_factory=dict)
    pods: tuple[Json, ...] = ()
    mlflow: Mlflow | None = None
    rejections: Mapping[str, str] = field(default_factory=dict)
    promoted_aliases: Mapping[str, str] = field(default_factory=dict)
    pod_events: Mapping[str, tuple[PodEvent, ...]] = field(default_factory=dict)
    queue_state: QueueState | None = None
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    offered_resources: frozenset[str] | None = None
    dry_run_answer: DryRunAnswer | None = None
    executors: tuple[Json, ...] = ()
    preparation: Preparation | None = None
    custom_children: CustomChildren | None = None
    lease: PreparationLease | None = None
    resumed: ResumedJob | None = None
    alias_versions: Mapping[str, AliasVersion] = field(default_factory=dict)
    code: ResolvedRevision | None = None


@dataclass(frozen=True)
class EnsureRun:
    """Create the job's MLflow run, unless one with the job's uid exists."""

    experiment: str
    run_name: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class FinishRun:
    """Close the job's MLflow run with this status."""

    run_id: str
    status: str


@dataclass(frozen=True)
class SetAlias:
    """Point an alias of a registered model at a version."""

    model: str
    alias: str
    version: str


@dataclass(frozen=True)
class TagVersion:
    """Set tags of a version of a registered model, in this order."""

    model: str
    version: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class LogMetrics:
    """Log metrics of the job's MLflow run, of this step."""

    run_id: str
    metrics: Mapping[str, float]
    step: int


@dataclass(frozen=True)
class SubmitRun:
    """Submit the Databricks run of the preparation, unless one with its token exists."""

    submission: Submission


@dataclass(frozen=True)
class CancelRun:
    """Cancel a Databricks run: of this id or, where no status names it, the active one of this name."""

    name: str
    run_id: str | None = None


MlflowAction = EnsureRun | FinishRun | SetAlias | TagVersion | LogMetrics
DatabricksAction = SubmitRun | CancelRun
Action = MlflowAction | DatabricksAction


@dataclass(frozen=True)
class ActionResult:
    """What became of an action.

    Attributes:
        run: the MLflow run that EnsureRun found or created, at `server`.
        databricks_run_id: the run that was submitted or canceled, if there is one.
        problem: why the action failed; None where it did not.
    """

    action: Action
    run: Run | None = None
    server: str = ""
    databricks_run_id: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Deletion:
    """A child to delete, with the uid it must have: a Job, a SparkApplication, or the pod of its driver."""

    name: str
    uid: str
    kind: str = "Job"


@dataclass(frozen=True)
class TakeLease:
    """Create the Lease of a preparation, in place of one that belongs to another job."""

    body: Json
    replaces: Json | None = None


@dataclass(frozen=True)
class Decision:
    """The new status, and the actions to take.

    Attributes:
        status: the complete new status.
        lease: the Lease to have before children are created.
        apply: children to create or update.
        delete: children to delete.
        sweep: whether to delete the other children too.
        actions: writes to MLflow and Databricks.
        finalizer: whether the resource must have the operator's finalizer; None to leave it unchanged.
        dry_runs: objects to create as dry runs. The rest of the decision counts only when it is made again with the answer.
        requeue_seconds: when the next pass is due if no event comes before; None for the next resync.
    """

    status: FineTuneJobStatus
    lease: TakeLease | None = None
    apply: tuple[Json, ...] = ()
    delete: tuple[Deletion, ...] = ()
    sweep: bool = False
    actions: tuple[Action, ...] = ()
    finalizer: bool | None = None
    dry_runs: tuple[Json, ...] = ()
    requeue_seconds: float | None = None
