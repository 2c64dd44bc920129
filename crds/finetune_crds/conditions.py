"""Condition types and reasons of all resources.

Only the operator writes conditions. Reasons are CamelCase and stable: people filter on them.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, list_type_map


class Condition(ApiModel):
    """One aspect of a resource's state, as metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition is true."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Reason for the status, as one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Reason for the status and what to do, in a sentence."""
    observed_generation: int | None = None
    """Generation of the spec that the condition describes."""
    last_transition_time: datetime
    """When the status last changed."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=16,
        json_schema_extra=list_type_map("type"),
    ),
]


# The observedGeneration of a new resource: no generation has this number. NB: kstatus considers a resource without conditions finished,
# unless observedGeneration differs from the generation.
UNSEEN = -1
ObservedGeneration = Annotated[int, Field(ge=UNSEEN)]


class ConditionType(StrEnum):
    """Condition types: first the types of all resources, then those of FineTuneJob, of ModelPromotion, and of FineTuneSchedule."""

    READY = "Ready"
    """A FineTuneJob has succeeded; the alias of a ModelPromotion points at a version that passed its gates; a
    FineTuneSchedule creates FineTuneJobs, or is suspended. The operator derives Ready from the other conditions, and copies
    reason and message from the condition that explains it."""
    RECONCILING = "Reconciling"
    """True while the operator works on the resource, or waits for something such as a server, a Secret or an approval.
    Absent otherwise, as kstatus expects."""
    STALLED = "Stalled"
    """True when the resource cannot make progress until its spec changes: a failed job, an invalid pod template, a refused
    promotion, an alias that does not point at the version that it should point at, or an invalid schedule. Absent
    otherwise."""
    ACCEPTED = "Accepted"
    """This version of the operator supports the spec."""
    CODE_RESOLVED = "CodeResolved"
    """The commit of `spec.trainer.code.git` is known, and every attempt runs it. Absent without `spec.trainer.code.git`."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true: the pods have stopped or are stopping, no alias is moved, and no FineTuneJob is created."""
    TRACKED = "Tracked"
    """The MLflow run exists, and MLflow answers."""
    PREPARED = "Prepared"
    """The splits exist at a known version."""
    TRAINED = "Trained"
    """A training attempt is complete."""
    MODELS_FOUND = "ModelsFound"
    """The aliases in `spec.model.base` and in the teacher are resolved to versions. Absent without such an alias."""
    CHECKPOINT_FOUND = "CheckpointFound"
    """The checkpoints of `spec.checkpoint.resumeFrom` exist, and this job can continue from them. Absent without
    `resumeFrom`."""
    CHECKPOINT_STORED = "CheckpointStored"
    """The newest checkpoint was written. Absent before the first checkpoint. The operator reads this from the trainer's tag
    on the run."""
    EVALUATED = "Evaluated"
    """The registered version was evaluated, and has the numbers as tags. Absent without `spec.evaluation`."""
    REGISTERED = "Registered"
    """The model version exists, and the aliases of `spec.register` point at it."""
    PODS_ADMITTED = "PodsAdmitted"
    """The API server accepted the training pods in a dry run, and their queue exists. Absent once the data is prepared."""
    PODS_HEALTHY = "PodsHealthy"
    """Every pod that should run is scheduled, and its image is pulled."""
    FINISHED = "Finished"
    """True when the job has succeeded or failed, for `kubectl wait`. Absent before."""
    SUCCEEDED = "Succeeded"
    """Terminal: the job completed every step of its spec."""
    FAILED = "Failed"
    """Terminal: the operator does not retry the job."""
    REGISTRY_READY = "RegistryReady"
    """The model registry answers."""
    SOURCE_READY = "SourceReady"
    """The source names a version that exists."""
    GATES_PASSED = "GatesPassed"
    """The candidate passed every gate; Unknown while a gate cannot be evaluated."""
    APPROVED = "Approved"
    """Enough people approved the candidate. Absent if no approval is needed."""
    SOAKED = "Soaked"
    """The soak time of the candidate is over. Absent without `spec.soakSeconds`."""
    PROMOTED = "Promoted"
    """The alias points at the version that it should point at."""
    DRIFTED = "Drifted"
    """Something other than this operator moved the alias."""
    REGRESSED = "Regressed"
    """The number of `spec.onRegression` was out of bounds for too long, and the alias moved back; Unknown while the number is
    out of bounds or cannot be read. Absent before the first move that is watched."""
    SERVED = "Served"
    """The endpoint serves the version that the alias points at. Absent without `spec.serving`."""
    SCHEDULED = "Scheduled"
    """The last start time was handled: a FineTuneJob was created, or its data had not changed. Absent before the first start
    time."""


SUMMARY = frozenset(
    {ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED, ConditionType.FINISHED}
)
"""Conditions that summarize the other conditions and contain no other information."""


class ConditionReason(StrEnum):
    """Reasons of conditions: first those of a job, in the order of its steps, then those of a promotion, then those of a schedule."""

    ACCEPTED = "Accepted"
    ACCEPTED_WITH_WARNING = "AcceptedWithWarning"
    INVALID_SPEC = "InvalidSpec"
    INSTALLATION_MISMATCH = "InstallationMismatch"
    SPEC_UNREADABLE = "SpecUnreadable"
    NOT_PERMITTED = "NotPermitted"
    GPU_LIMIT_REACHED = "GpuLimitReached"
    NOT_IMPLEMENTED = "NotImplemented"
    NAME_TAKEN = "NameTaken"
    CODE_RESOLVED = "CodeResolved"
    REVISION_NOT_FOUND = "RevisionNotFound"
    GIT_UNREACHABLE = "GitUnreachable"
    GIT_FORBIDDEN = "GitForbidden"
    GIT_ERROR = "GitError"
    RUN_READY = "RunReady"
    RUN_NOT_FOUND = "RunNotFound"
    RUN_REPLACED = "RunReplaced"
    RUN_FINISHED = "RunFinished"
    MLFLOW_UNREACHABLE = "MlflowUnreachable"
    MLFLOW_HOST_NOT_ALLOWED = "MlflowHostNotAllowed"
    MLFLOW_FORBIDDEN = "MlflowForbidden"
    MLFLOW_ERROR = "MlflowError"
    MLFLOW_REFUSED = "MlflowRefused"
    CREDENTIALS_MISSING = "CredentialsMissing"
    CREDENTIALS_UNREADABLE = "CredentialsUnreadable"
    MLFLOW_NOT_CONFIGURED = "MlflowNotConfigured"
    STORAGE_NOT_CONFIGURED = "StorageNotConfigured"
    CATALOG_NOT_CONFIGURED = "CatalogNotConfigured"
    MODELS_FOUND = "ModelsFound"
    WAITING_FOR_CHECKPOINT = "WaitingForCheckpoint"
    CHECKPOINT_FOUND = "CheckpointFound"
    PREPARING = "Preparing"
    WAITING_FOR_PREPARATION = "WaitingForPreparation"
    PREPARED = "Prepared"
    PREPARED_WITH_WARNING = "PreparedWithWarning"
    SPLITS_GIVEN = "SplitsGiven"
    NO_DATA = "NoData"
    STARTING = "Starting"
    QUEUED = "Queued"
    QUEUE_INADMISSIBLE = "QueueInadmissible"
    TRAINING = "Training"
    RESTARTING = "Restarting"
    CHECKPOINT_FAILED = "CheckpointFailed"
    CHECKPOINT_STORED = "CheckpointStored"
    TRAINED = "Trained"
    EVALUATING = "Evaluating"
    EVALUATED = "Evaluated"
    EVALUATION_FAILED = "EvaluationFailed"
    REGISTERING = "Registering"
    REGISTERED = "Registered"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    PODS_RUNNING = "PodsRunning"
    NO_PODS = "NoPods"
    SCALING_UP = "ScalingUp"
    UNSCHEDULABLE = "Unschedulable"
    VOLUME_NOT_READY = "VolumeNotReady"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    SANDBOX_FAILED = "SandboxFailed"
    NODE_NOT_READY = "NodeNotReady"
    PODS_ADMITTED = "PodsAdmitted"
    NOT_CHECKED = "NotChecked"
    CHECK_FAILED = "CheckFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_REJECTED = "PodRejected"
    POD_TEMPLATE_INVALID = "PodTemplateInvalid"
    EXECUTORS_FORBIDDEN = "ExecutorsForbidden"
    EXECUTORS_FAIL = "ExecutorsFail"
    SPARK_OPERATOR_MISSING = "SparkOperatorMissing"
    SPARK_OPERATOR_FORBIDDEN = "SparkOperatorForbidden"
    RUN_CANCELED = "RunCanceled"
    RUN_REFUSED = "RunRefused"
    SUCCEEDED = "Succeeded"
    RECIPE_WRONG = "RecipeWrong"
    DATA_WRONG = "DataWrong"
    CHECKOUT_FAILED = "CheckoutFailed"
    DEPENDENCIES_FAILED = "DependenciesFailed"
    FATAL_EXIT_CODE = "FatalExitCode"
    MAX_RESTARTS_REACHED = "MaxRestartsReached"
    NO_PROGRESS = "NoProgress"
    TRIALS_FAILED = "TrialsFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    PREPARATION_FAILED = "PreparationFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    REGISTRATION_FAILED = "RegistrationFailed"
    INTERNAL_ERROR = "InternalError"
    CONFLICT = "Conflict"
    REGISTRY_READY = "RegistryReady"
    REGISTRY_CHANGED = "RegistryChanged"
    WAITING_FOR_MODEL = "WaitingForModel"
    WAITING_FOR_VERSION = "WaitingForVersion"
    WAITING_FOR_ALIAS = "WaitingForAlias"
    WAITING_FOR_JOB = "WaitingForJob"
    JOB_FAILED = "JobFailed"
    SOURCE_UNREADABLE = "SourceUnreadable"
    COPYING = "Copying"
    COPY_NOT_STARTED = "CopyNotStarted"
    COPY_FAILED = "CopyFailed"
    SOURCE_RESOLVED = "SourceResolved"
    NO_GATES = "NoGates"
    GATES_PASSED = "GatesPassed"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    GATE_RUNNING = "GateRunning"
    GATE_NOT_STARTED = "GateNotStarted"
    PASSED_BEFORE = "PassedBefore"
    AWAITING_APPROVAL = "AwaitingApproval"
    APPROVED = "Approved"
    APPROVAL_TIMED_OUT = "ApprovalTimedOut"
    SOAKING = "Soaking"
    SOAKED = "Soaked"
    SOAK_BYPASSED = "SoakBypassed"
    AWAITING_WINDOW = "AwaitingWindow"
    PROMOTING = "Promoting"
    MOVE_DELAYED = "MoveDelayed"
    MOVE_REFUSED = "MoveRefused"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"
    NOTHING_TO_ROLL_BACK_TO = "NothingToRollBackTo"
    REVERTED = "Reverted"
    REPAIRED = "Repaired"
    ADOPTED = "Adopted"
    WITHDRAWN = "Withdrawn"
    OVERTAKEN = "Overtaken"
    IN_PLACE = "InPlace"
    ALIAS_MOVED = "AliasMoved"
    ALIAS_REMOVED = "AliasRemoved"
    ENDPOINT_UPDATING = "EndpointUpdating"
    ENDPOINT_BUSY = "EndpointBusy"
    ENDPOINT_READY = "EndpointReady"
    ENDPOINT_FAILED = "EndpointFailed"
    CANARY = "Canary"
    CANARY_FAILED = "CanaryFailed"
    CANARY_INCONCLUSIVE = "CanaryInconclusive"
    WATCHING = "Watching"
    WATCHED = "Watched"
    BREACHED = "Breached"
    REGRESSED = "Regressed"
    METRIC_INCONCLUSIVE = "MetricInconclusive"
    PROMETHEUS_UNREACHABLE = "PrometheusUnreachable"
    PROMETHEUS_FORBIDDEN = "PrometheusForbidden"
    PROMETHEUS_ERROR = "PrometheusError"
    DATABRICKS_UNREACHABLE = "DatabricksUnreachable"
    DATABRICKS_FORBIDDEN = "DatabricksForbidden"
    DATABRICKS_ERROR = "DatabricksError"
    DATABRICKS_NOT_CONFIGURED = "DatabricksNotConfigured"
    JOB_TEMPLATE_INVALID = "JobTemplateInvalid"
    JOB_TEMPLATE_REJECTED = "JobTemplateRejected"
    JOB_CREATED = "JobCreated"
    JOB_STILL_RUNNING = "JobStillRunning"
    START_TIME_MISSED = "StartTimeMissed"
    DATA_UNCHANGED = "DataUnchanged"
