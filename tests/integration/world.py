"""The integration tier's world: a real API server, the operator as a process, a real MLflow server.

There is no kubelet: a test plays it by writing pod statuses, and kube-controller-manager does the rest.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import requests
import yaml
from kubernetes import client, config, dynamic
from kubernetes.dynamic.exceptions import NotFoundError

from finetune_crds.contract import TerminationMessage

Json = dict[str, Any]
T = TypeVar("T")
SAMPLES = Path(__file__).parents[2] / "crds" / "samples"
_KINDS = {
    "FineTuneJob": "finetune.dev/v1alpha1",
    "ModelPromotion": "finetune.dev/v1alpha1",
    "Application": "argoproj.io/v1alpha1",
    "Job": "batch/v1",
    "Pod": "v1",
    "Service": "v1",
    "ConfigMap": "v1",
    "Secret": "v1",
    "Namespace": "v1",
    "Event": "v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "ServiceAccount": "v1",
    "ResourceQuota": "v1",
    "Lease": "coordination.k8s.io/v1",
}


def wait_for(what: str, check: Callable[[], T | None], seconds: float = 30) -> T:
    """The first true value of `check`; an AssertionError that names `what` when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not seen within {seconds} s: {what}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Api:
    """The API server, as plain JSON."""

    kubeconfig: Path
    _dynamic: Any = field(init=False)

    def __post_init__(self) -> None:
        self._dynamic = dynamic.DynamicClient(
            client.ApiClient(config.load_kube_config(str(self.kubeconfig)) or self._configuration())
        )

    def _configuration(self) -> client.Configuration:
        found = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=found)
        return found

    def _of(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=_KINDS[kind], kind=kind)

    def create(self, body: Json) -> Json:
        namespace = body["metadata"].get("namespace")
        return dict(self._of(body["kind"]).create(body=body, namespace=namespace).to_dict())

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        try:
            return dict(self._of(kind).get(name=name, namespace=namespace).to_dict())
        except NotFoundError:
            return None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        return list(self._of(kind).get(namespace=namespace, label_selector=selector).to_dict()["items"])

    def patch(self, kind: str, namespace: str, name: str, body: Json, *, status: bool = False) -> Json:
        target = self._of(kind)
        target = target.status if status else target
        content_type = "application/merge-patch+json"
        return dict(
            target.patch(body=body, name=name, namespace=namespace, content_type=content_type).to_dict()
        )

    def delete(self, kind: str, namespace: str, name: str) -> None:
        self._of(kind).delete(name=name, namespace=namespace, body={"propagationPolicy": "Background"})


class User(TypedDict):
    """Arguments of a child process that say who it runs as."""

    user: str | None
    group: int | None
    extra_groups: list[str | int] | None


def as_user(name: str | None) -> User:
    """Somebody by name; None for whoever we are."""
    if name is None:
        return {"user": None, "group": None, "extra_groups": None}
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


@dataclass
class Process:
    """A child process with its output in a file."""

    command: list[str]
    environment: Mapping[str, str]
    log: Path
    user: str | None = None
    """Who it runs as; None for whoever runs the tests."""
    _running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._running = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                **as_user(self.user),
            )

    def stop(self, with_signal: int = signal.SIGTERM, seconds: float = 20) -> None:
        if self._running is None:
            return
        self._running.send_signal(with_signal)
        try:
            self._running.wait(seconds)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
        self._running = None

    def kill(self) -> None:
        """As a node that loses power: no clean-up runs."""
        self.stop(signal.SIGKILL)


@dataclass
class Mlflow:
    """A real MLflow server on a database, by default one in a file."""

    folder: Path
    database: str = ""
    """Its address, as MLflow's --backend-store-uri takes it."""
    port: int = field(default_factory=free_port)
    extra: tuple[str, ...] = ()
    _process: Process | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        database = self.database or f"sqlite:///{self.folder}/mlflow.db"
        command += ["--backend-store-uri", database, "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts"), *self.extra]
        environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "GIT_PYTHON_REFRESH": "quiet"}
        self._process = Process(command, environment, self.folder / "mlflow.log")
        self._process.start()
        wait_for("MLflow answers", self._answers, 90)

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.uri}/health", timeout=2).ok
        except requests.RequestException:
            return False

    def stop(self) -> None:
        if self._process:
            self._process.stop()

    def post(self, path: str, body: Json) -> Json:
        answer = requests.post(f"{self.uri}/api/2.0/mlflow/{path}", json=body, timeout=10)
        answer.raise_for_status()
        return dict(answer.json())

    def get(self, path: str, **query: str) -> Json:
        answer = requests.get(f"{self.uri}/api/2.0/mlflow/{path}", params=query, timeout=10)
        answer.raise_for_status()
        return dict(answer.json())

    def log_metrics(self, run_id: str, **metrics: float) -> None:
        now = int(time.time() * 1000)
        values = [{"key": key, "value": value, "timestamp": now, "step": 0} for key, value in metrics.items()]
        self.post("runs/log-batch", {"run_id": run_id, "metrics": values})

    def runs_of(self, uid: str) -> list[Json]:
        experiments = self.post("experiments/search", {"max_results": 1000})["experiments"]
        body = {
            "experiment_ids": [item["experiment_id"] for item in experiments],
            "filter": f"tags.`finetune.dev/uid` = '{uid}'",
        }
        return list(self.post("runs/search", body).get("runs", []))

    def register(self, model: str, run_id: str) -> str:
        """A version, as the trainer makes it."""
        answer = requests.post(
            f"{self.uri}/api/2.0/mlflow/registered-models/create", json={"name": model}, timeout=10
        )
        if not answer.ok and "RESOURCE_ALREADY_EXISTS" not in answer.text:
            answer.raise_for_status()
        artifacts = self.get("runs/get", run_id=run_id)["run"]["info"]["artifact_uri"]
        body = {"name": model, "source": f"{artifacts}/model", "run_id": run_id}
        return str(self.post("model-versions/create", body)["model_version"]["version"])


@dataclass
class World:
    """What a test sees: one namespace, the operator, MLflow."""

    api: Api
    mlflow: Mlflow
    operator: Process
    namespace: str

    def submit(self, body: Json) -> Json:
        """Create a FineTuneJob in the test's namespace."""
        return self.api.create({**body, "metadata": {**body["metadata"], "namespace": self.namespace}})

    def job(self, name: str) -> Json:
        found = self.api.get("FineTuneJob", self.namespace, name)
        assert found is not None, f"FineTuneJob {name} is gone"
        return found

    def status(self, name: str) -> Json:
        return dict(self.job(name).get("status") or {})

    def condition(self, name: str, kind: str) -> Json:
        for item in self.status(name).get("conditions", []):
            if item["type"] == kind:
                return dict(item)
        return {}

    def wait_phase(self, name: str, phase: str, seconds: float = 40) -> Json:
        def seen() -> Json | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        try:
            return wait_for(f"{name} is {phase}", seen, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {yaml.safe_dump(self.status(name))}") from None

    def wait_condition(self, name: str, kind: str, reason: str, seconds: float = 40) -> Json:
        def seen() -> Json | None:
            found = self.condition(name, kind)
            return found if found.get("reason") == reason else None

        try:
            return wait_for(f"{name} has {kind} {reason}", seen, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {yaml.safe_dump(self.status(name))}") from None

    def wait_pods(self, job: str, count: int) -> list[Json]:
        """The pods of a child Job, once kube-controller-manager has made them."""

        def seen() -> list[Json] | None:
            found = self.api.list("Pod", self.namespace, f"batch.kubernetes.io/job-name={job}")
            return found if len(found) == count else None

        pods = wait_for(f"{count} pods of Job {job}", seen)
        return sorted(pods, key=lambda pod: pod["metadata"].get("annotations", {}).get(INDEX, ""))

    def run_pods(self, job: str, count: int) -> list[Json]:
        """Play the kubelet: the pods run and are ready."""
        pods = self.wait_pods(job, count)
        for pod in pods:
            container = pod["spec"]["containers"][0]["name"]
            self._pod_status(pod, "Running", [{"name": container, "state": {"running": {}}}], ready=True)
        return pods

    def end_pods(self, job: str, codes: list[int], messages: list[TerminationMessage | str | None]) -> None:
        """Play the kubelet: the pods end with these exit codes and termination messages."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pods = self.wait_pods(job, len(codes))
        for pod, code, message in zip(pods, codes, messages, strict=True):
            text = message.dump() if isinstance(message, TerminationMessage) else message or ""
            ended = {
                "exitCode": code,
                "message": text,
                "finishedAt": stamp,
                "reason": "Error" if code else "Completed",
            }
            container = pod["spec"]["containers"][0]["name"]
            phase = "Failed" if code else "Succeeded"
            self._pod_status(pod, phase, [{"name": container, "state": {"terminated": ended}}], ready=False)

    def set_waiting(self, pod: Json, reason: str, message: str) -> None:
        """Play the kubelet: a container cannot start."""
        container = pod["spec"]["containers"][0]["name"]
        waiting = {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}
        self._pod_status(pod, "Pending", [waiting], ready=False)

    def _pod_status(self, pod: Json, phase: str, containers: list[Json], *, ready: bool) -> None:
        image = pod["spec"]["containers"][0]["image"]
        complete = {"image": image, "imageID": "", "restartCount": 0, "ready": ready}
        status = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**complete, **item} for item in containers],
        }
        meta = pod["metadata"]
        self.api.patch("Pod", meta["namespace"], meta["name"], {"status": status}, status=True)

    def remaining_pods(self) -> list[Json]:
        """Play the kubelet, under which pods that are to be deleted stop at once; the others."""
        for pod in self.api.list("Pod", self.namespace):
            if pod["metadata"].get("deletionTimestamp"):
                self.remove_pod(pod)
        return self.api.list("Pod", self.namespace)

    def remove_pod(self, pod: Json) -> None:
        core = client.CoreV1Api(self.api._dynamic.client)
        try:
            core.delete_namespaced_pod(
                pod["metadata"]["name"],
                self.namespace,
                grace_period_seconds=0,
                propagation_policy="Background",
            )
        except client.ApiException as error:
            if error.status != 404:
                raise

    def events(self, reason: str) -> list[Json]:
        return [item for item in self.api.list("Event", self.namespace) if item["reason"] == reason]


INDEX = "batch.kubernetes.io/job-completion-index"


def operator_process(kubeconfig: Path, log: Path, environment: Mapping[str, str]) -> Process:
    """The operator, as it is started in its pod, with short intervals."""
    return Process(
        [sys.executable, "-m", "finetune_operator"],
        {
            "KUBECONFIG": str(kubeconfig),
            "FINETUNE_LIVENESS": f"http://127.0.0.1:{free_port()}/healthz",
            "FINETUNE_METRICS_PORT": "0",
            "FINETUNE_RESYNC_SECONDS": "5",
            "FINETUNE_POLL_SECONDS": "0.5",
            **environment,
        },
        log,
    )


@contextmanager
def running(process: Process | Mlflow) -> Iterator[None]:
    """A process for the time of a block."""
    try:
        process.start()
        yield
    finally:
        process.stop()
