"""Condition types and reasons of both resources.

Only the operator writes conditions. Reasons are CamelCase and stable: people filter on them.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, list_type_map


class Condition(ApiModel):
    """One aspect of the resource, as metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Which aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why it holds or not, as one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why it holds or not, and what to do, in a sentence."""
    observed_generation: int | None = None
    """Generation of the spec that the condition describes."""
    last_transition_time: datetime
    """When its status last changed."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=16,
        json_schema_extra=list_type_map("type"),
    ),
]


# NB: kstatus takes a resource without conditions for finished, unless its observedGeneration is another than its generation.
UNSEEN = -1
ObservedGeneration = Annotated[int, Field(ge=UNSEEN)]


class ConditionType(StrEnum):
    """Condition types: first those of both resources, then a FineTuneJob's, then a ModelPromotion's."""

    READY = "Ready"
    """The summary: a FineTuneJob has succeeded; the alias of a ModelPromotion is at a version that passed. The operator
    writes it last, from the other conditions; reason and message are those of the condition that explains it."""
    RECONCILING = "Reconciling"
    """True while the operator works on the resource, or waits for something that may come: a server, a Secret, an approval.
    Absent otherwise, as kstatus expects of it."""
    STALLED = "Stalled"
    """True when the resource comes no further unless its spec changes: a failed job, a pod template that is wrong, a
    promotion that was refused, or that is not where it should be. Absent otherwise."""
    ACCEPTED = "Accepted"
    """This version of the operator can carry out the spec."""
    CODE_RESOLVED = "CodeResolved"
    """The commit of `spec.trainer.code.git` is known, and every attempt runs it; absent without it."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true: the pods have stopped, or are stopping; no alias is moved."""
    TRACKED = "Tracked"
    """The MLflow run exists, and MLflow answers."""
    PREPARED = "Prepared"
    """The splits exist at a known version."""
    TRAINED = "Trained"
    """A training attempt is complete."""
    MODELS_FOUND = "ModelsFound"
    """The versions are known that models:/name@alias of `spec.model.base` and of the teacher name; absent without an alias."""
    CHECKPOINT_FOUND = "CheckpointFound"
    """The checkpoints of `spec.checkpoint.resumeFrom` are known, and this job may carry them on; absent without it."""
    CHECKPOINT_STORED = "CheckpointStored"
    """The newest checkpoint could be written; absent before the first. Read from the trainer's tag on the run."""
    EVALUATED = "Evaluated"
    """The registered version was evaluated, and has the numbers as tags; absent without spec.evaluation."""
    REGISTERED = "Registered"
    """The version exists and its aliases point at it."""
    PODS_ADMITTED = "PodsAdmitted"
    """The API server would create the training pods, as a dry run says before anything is created, and their queue exists;
    absent once the data are prepared."""
    PODS_HEALTHY = "PodsHealthy"
    """Every pod that should run is scheduled, and its image is pulled."""
    FINISHED = "Finished"
    """True when the job has succeeded or failed, for `kubectl wait`. Absent before."""
    SUCCEEDED = "Succeeded"
    """Terminal: the job completed every step of its spec."""
    FAILED = "Failed"
    """Terminal: the operator does not try again."""
    REGISTRY_READY = "RegistryReady"
    """The model registry answers."""
    SOURCE_READY = "SourceReady"
    """The source names a version that exists."""
    GATES_PASSED = "GatesPassed"
    """The candidate passed every gate; Unknown while a gate cannot be evaluated."""
    APPROVED = "Approved"
    """A person approved the candidate; absent without spec.approval."""
    SOAKED = "Soaked"
    """The soak time of the candidate is over; absent without soakSeconds."""
    PROMOTED = "Promoted"
    """The alias points at the version that it should point at."""
    DRIFTED = "Drifted"
    """Something other than this operator moved the alias."""
    SERVED = "Served"
    """The endpoint serves the version that the alias points at; absent without serving."""


SUMMARY = frozenset(
    {ConditionType.READY, ConditionType.RECONCILING, ConditionType.STALLED, ConditionType.FINISHED}
)
"""Conditions that sum up the others: they say nothing that no other condition says."""


class ConditionReason(StrEnum):
    """Reasons, in the order in which a job, and then a promotion, can have them."""

    ACCEPTED = "Accepted"
    ACCEPTED_WITH_WARNING = "AcceptedWithWarning"
    INVALID_SPEC = "InvalidSpec"
    INSTALLATION_MISMATCH = "InstallationMismatch"
    SPEC_UNREADABLE = "SpecUnreadable"
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
    SOURCE_RESOLVED = "SourceResolved"
    NO_GATES = "NoGates"
    GATES_PASSED = "GatesPassed"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    PASSED_BEFORE = "PassedBefore"
    AWAITING_APPROVAL = "AwaitingApproval"
    APPROVED = "Approved"
    APPROVAL_TIMED_OUT = "ApprovalTimedOut"
    SOAKING = "Soaking"
    SOAKED = "Soaked"
    SOAK_BYPASSED = "SoakBypassed"
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
    DATABRICKS_UNREACHABLE = "DatabricksUnreachable"
    DATABRICKS_FORBIDDEN = "DatabricksForbidden"
    DATABRICKS_ERROR = "DatabricksError"
    DATABRICKS_NOT_CONFIGURED = "DatabricksNotConfigured"
