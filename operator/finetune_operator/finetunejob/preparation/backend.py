"""The protocol of a backend: one way to run a preparation, which data.prepare.spark.mode selects.

A backend is pure, like the policies that ask it: it reads the job and what was observed, and writes to the draft. What it leaves out
has a default here. Another backend is a module of its own, a line in `backends.BACKENDS`, and its mode in the API.
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
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import Decision, FineTuneJob, Observed
from finetune_operator.policy.result import Outcome
from finetune_operator.settings import Settings


@dataclass(frozen=True)
class CustomKind:
    """A kind of another operator. A backend creates one object of it for each attempt.

    Attributes:
        name: the kind.
        missing: what a job waits for in a cluster that does not have the kind.
        forbidden: the same where the operator may not read it; `{error}` stands for the answer of the API server.
        remedy: what to correct when the API server rejects an object.
    """

    name: str
    missing: Problem
    forbidden: Problem
    remedy: str


class Backend(Protocol):
    """What the operator asks of a backend.

    The observer lists the Jobs and pods of every job, the objects of `custom_kind`, and the pods that the job itself controls.
    """

    modes: ClassVar[tuple[str, ...]]
    """The values of data.prepare.spark.mode that it runs."""
    custom_kind: ClassVar[CustomKind | None] = None
    """The kind of its children besides Job, Service and ConfigMap."""

    # Acceptance

    def find_mistakes(self, spec: FineTuneJobSpec, settings: Settings) -> Iterable[str]:
        """What is wrong with immutable fields once the defaults of the installation apply."""
        return ()

    def find_pod_mistakes(self, spec: FineTuneJobSpec) -> Iterable[str]:
        """What is wrong with spec.pods, which can be corrected."""
        return ()

    def find_obstacles(
        self, spec: FineTuneJobSpec, settings: Settings, namespace: str
    ) -> Iterable[tuple[ConditionReason, str]]:
        """What a job of a namespace waits for before it is accepted, such as a login."""
        return ()

    def build_dry_runs(self, draft: Draft) -> Iterable[Json]:
        """What the API server is asked before the job starts."""
        return ()

    # The preparation

    @abstractmethod
    def prepare(self, draft: Draft) -> Outcome:
        """Create the splits; the pass ends until they exist."""

    @abstractmethod
    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        """Whether an attempt of a job that is not prepared exists, and has not ended without a result.

        Args:
            jobs: the job's child Jobs, by name.
        """

    def clean_up(self, draft: Draft) -> None:
        """Delete what a preparation that is complete still runs."""
        return

    def stop(self, draft: Draft) -> str | None:
        """Stop what may run besides Jobs, for a job that is suspended or has finished.

        Returns what to wait for; None when nothing is left. It goes by the status, since the spec may be unreadable.
        """
        return None

    def reads_custom_kind(self, ftj: FineTuneJob) -> bool:
        """Whether the objects of `custom_kind` are to be read in this pass, for a job of this backend."""
        return False

    # A run outside the cluster, which no ownerReference deletes

    def needs_finalizer(self, status: FineTuneJobStatus) -> bool:
        """Whether a run may be at work that has to be canceled before the job is deleted."""
        return False

    def release(self, draft: Draft) -> None:
        """Cancel the run of a job that is being deleted, and remove the finalizer when it has ended."""
        draft.finalizer = False

    def may_release(self, ftj: FineTuneJob, problem: Problem) -> bool:
        """Whether a job that is being deleted may go although its run cannot be looked up."""
        return False

    def record_run(self, decision: Decision, run_id: str | None) -> Decision:
        """The decision after its run was submitted or canceled; None: there was none to cancel."""
        return decision

    def record_refusal(self, status: FineTuneJobStatus) -> FineTuneJobStatus:
        """The status after the submission of its run was refused for good."""
        return status

    # What people see

    def find_page(self, status: FineTuneJobStatus) -> str | None:
        """The page of the preparation, for a browser."""
        return None

    def find_progress(self, observed: Observed) -> str:
        """The step that the preparation reports by itself; empty where it reports to MLflow."""
        return ""
