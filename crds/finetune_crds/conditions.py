"""Condition types and reasons of FineTuneJob, each with who writes it and when.

The operator alone writes conditions. Reasons are CamelCase and stable: people filter on them.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel


class Condition(ApiModel):
    """One aspect of the resource, as metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Which aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in a sentence a person can act on."""
    observed_generation: int | None = None
    """Generation of the spec it is about."""
    last_transition_time: datetime
    """When its status last changed."""


class Type(StrEnum):
    """Condition types."""

    ACCEPTED = "Accepted"
    """The spec can be run by this version of the operator."""
    TRACKED = "Tracked"
    """The MLflow run exists and MLflow answers."""
    PREPARED = "Prepared"
    """The splits exist at a known version."""
    TRAINED = "Trained"
    """An attempt ran to its end."""
    CHECKPOINT_STORED = "CheckpointStored"
    """The newest checkpoint could be written; absent before the first. Read from the trainer's tag on the run."""
    REGISTERED = "Registered"
    """The version exists and its aliases point at it."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true: the pods have stopped, or are stopping."""
    PODS_HEALTHY = "PodsHealthy"
    """Every pod that should run could be scheduled and its image pulled."""
    SUCCEEDED = "Succeeded"
    """Terminal: everything asked for is there."""
    FAILED = "Failed"
    """Terminal: it will not be tried again."""


class Reason(StrEnum):
    """Reasons, in the order a job can meet them."""

    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NOT_IMPLEMENTED = "NotImplemented"
    NAME_TAKEN = "NameTaken"
    RUN_READY = "RunReady"
    RUN_FINISHED = "RunFinished"
    MLFLOW_UNREACHABLE = "MlflowUnreachable"
    MLFLOW_HOST_NOT_ALLOWED = "MlflowHostNotAllowed"
    MLFLOW_FORBIDDEN = "MlflowForbidden"
    MLFLOW_ERROR = "MlflowError"
    MLFLOW_NOT_CONFIGURED = "MlflowNotConfigured"
    PREPARING = "Preparing"
    PREPARED = "Prepared"
    SPLITS_GIVEN = "SplitsGiven"
    STARTING = "Starting"
    TRAINING = "Training"
    RESTARTING = "Restarting"
    CHECKPOINT_FAILED = "CheckpointFailed"
    CHECKPOINT_STORED = "CheckpointStored"
    TRAINED = "Trained"
    REGISTERING = "Registering"
    REGISTERED = "Registered"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    PODS_RUNNING = "PodsRunning"
    NO_PODS = "NoPods"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    POD_REJECTED = "PodRejected"
    SUCCEEDED = "Succeeded"
    RECIPE_WRONG = "RecipeWrong"
    DATA_WRONG = "DataWrong"
    FATAL_EXIT_CODE = "FatalExitCode"
    MAX_RESTARTS_REACHED = "MaxRestartsReached"
    PREPARATION_FAILED = "PreparationFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    REGISTRATION_FAILED = "RegistrationFailed"
