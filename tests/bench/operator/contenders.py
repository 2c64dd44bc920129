"""The contenders: the operator and JobSet, each as a process with its manifest of a job with four pods."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import requests
import yaml

from bench.operator.api import Json
from bench.operator.plane import Plane
from cluster import binaries
from finetune_crds.base import API_VERSION
from fixtures.operator_processes.jobs import splits_given
from support.mlflow_server import Mlflow
from support.operator_process import metric, operator_process
from support.ports import free_port
from support.process import Process
from support.waiting import wait_for

PODS = 4
OURS, JOBSET = "ours", "jobset"
NAMES = (OURS, JOBSET)
_OUR_CRDS = Path(__file__).parents[3] / "crds" / "manifests"
_SECONDS_TO_START = 120.0


class Contender(Protocol):
    """A controller that runs gangs of pods.

    Attributes:
        name: in reports and in the audit log.
        companions: collections of children, beside Jobs and pods, by API and plural, and how many each job has there.
    """

    name: ClassVar[str]
    companions: ClassVar[Mapping[str, int]]
    process: Process

    def start(self) -> None:
        """Start the process, and return when it works."""

    def path(self, namespace: str) -> str:
        """The collection of its jobs in a namespace."""

    def manifest(self, name: str) -> Json:
        """A job with PODS pods."""

    def is_reported(self, job: Json) -> bool:
        """Whether the status of a job says that its pods were created."""


@dataclass
class Ours:
    """The operator of this repository, with the chart's default settings."""

    name: ClassVar[str] = OURS
    companions: ClassVar[Mapping[str, int]] = {
        "api/v1/services": 1,
        "api/v1/configmaps": 1,
        "apis/networking.k8s.io/v1/networkpolicies": 1,
    }

    process: Process
    liveness: str

    @classmethod
    def on(cls, plane: Plane, mlflow: Mlflow, folder: Path) -> Ours:
        """The operator on a control plane, not started yet."""
        liveness = f"http://127.0.0.1:{free_port()}/healthz"
        settings = {
            "FINETUNE_LIVENESS": liveness,
            "FINETUNE_TRACKING_URI": mlflow.uri,
            # What support.operator_process shortens for tests.
            "FINETUNE_RESYNC_SECONDS": "",
            "FINETUNE_POLL_SECONDS": "",
        }
        return cls(operator_process(plane.kubeconfig, folder / "operator.log", settings), liveness)

    def start(self) -> None:
        """Start the process, and wait for its first pass over all resources."""
        self.process.start()
        wait_for("the operator works", lambda: _answers(self.liveness), _SECONDS_TO_START, self.process)

    def passes(self) -> float:
        """Passes over FineTuneJobs since the process was started."""
        return metric(self.process, "finetune_operator_reconcile_seconds_count", kind="FineTuneJob")

    def waiting(self) -> float:
        """Resources that wait for a worker."""
        return metric(self.process, "finetune_operator_queue_depth")

    def path(self, namespace: str) -> str:
        return f"/apis/{API_VERSION}/namespaces/{namespace}/finetunejobs"

    def manifest(self, name: str) -> Json:
        return splits_given(name, distributed={"nodes": PODS, "processesPerNode": 1})

    def is_reported(self, job: Json) -> bool:
        status = job.get("status") or {}
        return bool(status.get("phase") == "Starting" and status.get("attempt") == 1)


@dataclass
class JobSet:
    """The controller of JobSet, without its webhooks: the manifest has the fields that they would set."""

    name: ClassVar[str] = JOBSET
    companions: ClassVar[Mapping[str, int]] = {"api/v1/services": 1}

    process: Process
    health: str

    @classmethod
    def on(cls, plane: Plane, folder: Path) -> JobSet:
        """JobSet on a control plane, not started yet."""
        program = binaries.path("jobset")
        health = f"127.0.0.1:{free_port()}"
        certificates = folder / "jobset-certificates"
        certificates.mkdir()
        # NB: its server of webhooks needs a certificate, although nothing calls it.
        pair = plane.control_plane.authority.issue("jobset-webhook", "webhook", hosts=["127.0.0.1"])
        shutil.copyfile(pair.certificate, certificates / "tls.crt")
        shutil.copyfile(pair.key, certificates / "tls.key")
        configuration = folder / "jobset.yaml"
        configuration.write_text(yaml.safe_dump(jobset_configuration(certificates, health)), encoding="utf-8")
        argv = [str(program), f"--config={configuration}", "--metrics-bind-address=0"]
        environment = {"KUBECONFIG": str(plane.kubeconfig)}
        return cls(Process("jobset", argv, folder / "jobset.log", environment), f"http://{health}/readyz")

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        self.process.start()
        wait_for("JobSet is ready", lambda: _answers(self.health), _SECONDS_TO_START, self.process)

    def path(self, namespace: str) -> str:
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    def manifest(self, name: str) -> Json:
        return jobset_manifest(name)

    def is_reported(self, job: Json) -> bool:
        return bool((job.get("status") or {}).get("replicatedJobsStatus"))


def find_crds(name: str) -> list[Path]:
    """The files with the CRDs of a contender."""
    if name == OURS:
        return sorted(_OUR_CRDS.glob("*.yaml"))
    return sorted((binaries.path("jobset").parent / "config/components/crd/bases").glob("*.yaml"))


def jobset_configuration(certificates: Path, health: str) -> Json:
    """JobSet's configuration: its own rate limits, and neither managed certificates nor leader election."""
    return {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"qps": 500, "burst": 500},
        "webhook": {"host": "127.0.0.1", "port": free_port(), "certDir": str(certificates)},
        "health": {"healthProbeBindAddress": health},
    }


def jobset_manifest(name: str) -> Json:
    """A JobSet of one Job with PODS pods and a headless Service, as its webhook would complete it."""
    pod = {
        "restartPolicy": "Never",
        "dnsPolicy": "ClusterFirst",
        "containers": [{"name": "main", "image": "trainer:latest", "command": ["torchrun", "train.py"]}],
    }
    job = {
        "completionMode": "Indexed",
        "parallelism": PODS,
        "completions": PODS,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=2).ok
    except requests.RequestException:
        return False
