"""What a pass over a FineTuneJob decides: the new status, the children, and writes to MLflow and Databricks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from finetune_crds.base import Json
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.databricks.model import Submission
from finetune_operator.errors import Problem
from finetune_operator.mlflow.model import Run


@dataclass(frozen=True)
class EnsureRun:
    """Create the job's MLflow run, unless a run with the job's uid exists."""

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
    """Set tags of a version of a registered model, in the order of `tags`."""

    model: str
    version: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class LogMetrics:
    """Log metrics of one step to the job's MLflow run."""

    run_id: str
    metrics: Mapping[str, float]
    step: int


@dataclass(frozen=True)
class SubmitRun:
    """Submit the Databricks run of the preparation, unless a run with its token exists."""

    submission: Submission


@dataclass(frozen=True)
class CancelRun:
    """Cancel the Databricks run with this id or, if the status has no id, the active run of this name."""

    name: str
    run_id: str | None = None


MlflowAction = FinishRun | SetAlias | TagVersion | LogMetrics
DatabricksAction = SubmitRun | CancelRun
Action = EnsureRun | MlflowAction | DatabricksAction


@dataclass(frozen=True)
class ActionResult:
    """The result of an action.

    Attributes:
        run: the MLflow run that EnsureRun found or created.
        server: address of the MLflow server that has this run.
        databricks_run_id: the run that was submitted or canceled, if there is one.
        problem: why the action failed; None if it succeeded.
        pending_seconds: for how long the action has been going on; None if it is over. A later pass requests it again, and gets its result.
    """

    action: Action
    run: Run | None = None
    server: str = ""
    databricks_run_id: str | None = None
    problem: Problem | None = None
    pending_seconds: float | None = None


@dataclass(frozen=True)
class Deletion:
    """A child to delete, with the uid it must have: a Job, a SparkApplication, the pod of its driver, or a FineTuneJob of a sweep."""

    name: str
    uid: str
    kind: str = "Job"
    frees_name: bool = False
    """Delete a Job before its pods are deleted. The FineTuneJob's status has the uid of the Job, so the operator still finds the pods."""


@dataclass(frozen=True)
class SpecChange:
    """Fields of the spec of a FineTuneJob that a sweep owns, with their new values, and the uid it must have."""

    name: str
    uid: str
    fields: Json


@dataclass(frozen=True)
class TakeLease:
    """Create the Lease of a preparation. `replaces`: the Lease of another job, which is deleted first."""

    body: Json
    replaces: Json | None = None


@dataclass(frozen=True)
class Decision:
    """The new status, and the actions to take.

    Attributes:
        status: the complete new status.
        lease: the Lease to take before children are created.
        apply: children to create or update.
        delete: children to delete.
        scaled: Jobs whose parallelism changes, each with this field alone.
        changed: FineTuneJobs of the job's sweep whose spec changes.
        deletes_all: whether to delete all Services, ConfigMaps and custom children, in addition to `delete`.
        actions: writes to MLflow and Databricks.
        finalizer: whether the resource must have the operator's finalizer; None to leave it unchanged.
        dry_runs: objects to create as dry runs. If there are any, the decision is made again with the response, and replaces this decision.
        suggestions: the request for values of trials. If there is one, the decision is made again with the answer, and replaces this one.
        requeue_seconds: when the next pass is due if no event comes before; None for the longest wait.
    """

    status: FineTuneJobStatus
    lease: TakeLease | None = None
    apply: tuple[Json, ...] = ()
    delete: tuple[Deletion, ...] = ()
    scaled: tuple[Json, ...] = ()
    changed: tuple[SpecChange, ...] = ()
    deletes_all: bool = False
    actions: tuple[Action, ...] = ()
    finalizer: bool | None = None
    dry_runs: tuple[Json, ...] = ()
    suggestions: Json | None = None
    requeue_seconds: float | None = None
