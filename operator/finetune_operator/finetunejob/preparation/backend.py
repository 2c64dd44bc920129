"""The protocol of a backend: one way to run a preparation, which data.prepare.spark.mode selects.

A backend is pure, like the policies that call it: it reads the job and what was observed, and writes to the draft. Methods that a
backend does not define have defaults here. A new backend is a module of its own, a line in `backends.BACKENDS`, and a mode in the API.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.policy.result import Outcome
from finetune_operator.settings import Settings


@dataclass(frozen=True)
class CustomKind:
    """A custom resource kind of another operator. A backend creates one object of it for each attempt.

    Attributes:
        name: the kind.
        missing: the problem of a job in a cluster that does not have the kind.
        forbidden: the problem of a job if the operator is not allowed to read the kind; `{error}` stands for the API server's response.
        remedy: what to correct when the API server rejects an object.
    """

    name: str
    missing: Problem
    forbidden: Problem
    remedy: str


class Backend(Protocol):
    """The methods that the operator requires of a backend.

    The observer lists the Jobs and pods of every job, the objects of `custom_kind`, and the pods that the job itself controls.
    """

    modes: ClassVar[tuple[str, ...]]
    """The values of data.prepare.spark.mode that the backend runs."""
    custom_kind: ClassVar[CustomKind | None] = None
    """The kind of the backend's children in addition to Job, Service and ConfigMap."""

    # Acceptance

    def find_mistakes(self, spec: FineTuneJobSpec, settings: Settings) -> Iterable[str]:
        """Return the mistakes in immutable fields. The spec includes the defaults of the chart."""
        return ()

    def find_pod_mistakes(self, spec: FineTuneJobSpec) -> Iterable[str]:
        """Return the mistakes in spec.pods, which can be corrected."""
        return ()

    def find_obstacles(
        self, spec: FineTuneJobSpec, settings: Settings, namespace: str
    ) -> Iterable[tuple[ConditionReason, str]]:
        """Return the obstacles that keep a job from being accepted, for example a missing login."""
        return ()

    def build_dry_runs(self, draft: Draft) -> Iterable[Json]:
        """Objects that the API server must accept in a dry run before the job starts, for example a review of access rights."""
        return ()

    # The preparation

    @abstractmethod
    def prepare(self, draft: Draft) -> Outcome:
        """Run the preparation. Until the splits exist, each pass ends here."""

    @abstractmethod
    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        """Whether an attempt of the preparation runs, or ended with a result. Called while the job is not prepared.

        Args:
            jobs: the job's child Jobs, by name.
        """

    def clean_up(self, draft: Draft) -> None:
        """Delete what still runs after the preparation completed."""
        return

    def stop(self, draft: Draft) -> str | None:
        """Stop what runs outside of Jobs, for a job that is suspended or has finished.

        Returns what to wait for; None when everything has stopped. The spec may be unreadable here, so a backend does not read it.
        """
        return None

    def reads_custom_kind(self, ftj: FineTuneJob) -> bool:
        """Whether this pass reads the objects of `custom_kind`, for a job of this backend."""
        return False

    # A run outside the cluster, which no ownerReference deletes

    def needs_finalizer(self, status: FineTuneJobStatus) -> bool:
        """Whether a run may exist that must be canceled before the job is deleted."""
        return False

    def release(self, draft: Draft) -> None:
        """Cancel the run of a job that is being deleted, and remove the finalizer when the run has ended."""
        draft.finalizer = False

    def may_release(self, ftj: FineTuneJob, problem: Problem) -> bool:
        """Whether a job may be deleted although its run cannot be read."""
        return False

    def record_run(self, decision: Decision, run_id: str | None) -> Decision:
        """The decision, updated after a run was submitted or canceled; `run_id` is None if there was no run to cancel."""
        return decision

    def record_refusal(self, status: FineTuneJobStatus) -> FineTuneJobStatus:
        """The status, updated after the submission of a run was refused for good."""
        return status

    # What people see

    def find_page(self, status: FineTuneJobStatus) -> str | None:
        """The page of the preparation, for a browser."""
        return None

    def find_progress(self, observed: Observed) -> str:
        """Return the step that the preparation reports by itself; empty if it reports to MLflow."""
        return ""
