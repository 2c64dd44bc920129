"""What is measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fleet:
    """The start of many jobs.

    Attributes:
        pods_seconds: from the first create until all pods and other children exist.
        status_seconds: from the first create until each status says so.
        cpu_seconds: CPU time of the controller, from the first create until shortly after the last status.
        plane_cpu_seconds, mlflow_cpu_seconds: CPU time of etcd and of the control plane, and of the MLflow server, in that time.
        api_requests, mlflow_requests: requests of the controller in that time.
    """

    jobs: int
    pods_seconds: float
    status_seconds: float
    cpu_seconds: float
    plane_cpu_seconds: float
    mlflow_cpu_seconds: float
    api_requests: Counter[str] = field(default_factory=Counter)
    mlflow_requests: Counter[str] = field(default_factory=Counter)

    @property
    def jobs_per_second(self) -> float:
        """Jobs whose pods exist, by the second."""
        return self.jobs / self.pods_seconds

    @property
    def cpu_milliseconds_per_job(self) -> float:
        """CPU time of the controller for each job."""
        return 1000 * self.cpu_seconds / self.jobs

    def affordable_jobs_per_second(self, cores: int) -> float:
        """Jobs by the second if all these processes had the cores to themselves, and never waited."""
        total = self.cpu_seconds + self.plane_cpu_seconds + self.mlflow_cpu_seconds
        return cores * self.jobs / total


@dataclass(frozen=True)
class Restart:
    """A controller that was stopped and started again among jobs that need nothing.

    Attributes:
        seconds: from its start until each job was reconciled; None if the controller does not say so.
        memory_mib, peak_mib: resident memory one resync later, and at its peak.
        cpu_seconds: CPU time until then.
        writes: requests that changed something, to the API server and to MLflow. No job needs one.
    """

    jobs: int
    seconds: float | None
    memory_mib: float
    peak_mib: float
    cpu_seconds: float
    writes: Counter[str] = field(default_factory=Counter)


@dataclass
class Visit:
    """One contender on a control plane of its own.

    Attributes:
        contender: its name.
        fleets: the jobs that it started, one fleet after another.
        memory_mib, peak_mib: resident memory after the last fleet, and at its peak.
        idle_seconds: CPU time a minute with all these jobs, while nothing happens.
    """

    contender: str
    fleets: list[Fleet] = field(default_factory=list)
    memory_mib: float | None = None
    peak_mib: float | None = None
    idle_seconds: float | None = None
    restart: Restart | None = None


@dataclass(frozen=True)
class Reaction:
    """Seconds from a pod's failed status until its Job failed, and until the Job of the next attempt was created."""

    job_failed: float
    next_attempt: float


@dataclass
class Running:
    """Many running jobs, for some minutes.

    Attributes:
        jobs: how many ran.
        seconds: how long they were measured.
        cpu_seconds: CPU time of the operator in this time.
        memory_mib, peak_mib: its resident memory afterwards, and at its peak.
        api_requests, mlflow_requests: its requests in this time.
        current_share: the share of jobs whose status then had the progress of the last report, or of the one before.
        reports, lost_reports: what the trainings reported to MLflow, and what it did not take.
        reactions: to pods that failed afterwards, while the others went on.
        missed: failed pods after which no attempt came in time.
    """

    jobs: int
    seconds: float
    cpu_seconds: float
    memory_mib: float
    peak_mib: float
    api_requests: Counter[str]
    mlflow_requests: Counter[str]
    current_share: float
    reports: int
    lost_reports: int
    reactions: list[Reaction] = field(default_factory=list)
    missed: int = 0
