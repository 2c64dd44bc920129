"""A real API server, a real MLflow server with models, many promotions, and the operator as a process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.promotions.writes import AUDIT_POLICY, Tail
from cluster.controlplane import ControlPlane
from finetune_crds.base import API_VERSION
from finetune_crds.contract import METRIC_EVAL_LOSS, TAG_EVAL_DATA
from support.mlflow_server import Mlflow
from support.operator_process import metric, operator_process
from support.process import Process, running
from support.waiting import wait_for

Json = dict[str, Any]
CRDS = Path(__file__).parents[3] / "crds" / "manifests"
NAMESPACE = "bench"
PATH = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/modelpromotions"
RESYNC_SECONDS = 30
ALIASES = ("staging", "champion")
_THREADS = 4


@dataclass
class World:
    """Everything that runs, and where it writes down what was asked of it."""

    plane: ControlPlane
    mlflow: Mlflow
    operator: Process
    audit: Path

    @property
    def access(self) -> Path:
        """MLflow's access log."""
        return self.mlflow.log

    def tails(self) -> tuple[Tail, Tail]:
        """Both logs from now on."""
        return Tail(self.audit), Tail(self.access)

    def promotions(self) -> list[Json]:
        """All promotions as they are."""
        items: list[Json] = self._call("GET", PATH)["items"]
        return items

    def create(self, path: str, body: Json) -> None:
        """Create an object."""
        self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Json | None = None) -> Any:
        status, answer = self.plane.client.call(method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return answer

    def passes(self) -> float:
        """Passes over promotions since the operator was started; 0 while it does not answer."""
        return metric(self.operator, "finetune_operator_reconcile_seconds_count", kind="ModelPromotion")

    def waiting(self) -> float:
        """Resources that wait for a worker."""
        return metric(self.operator, "finetune_operator_queue_depth")

    def failures(self) -> float:
        """Passes that failed since the operator was started."""
        return metric(self.operator, "finetune_operator_reconcile_errors_total")

    def memory_mib(self) -> float:
        """Resident memory of the operator."""
        text = Path(f"/proc/{self.operator.pid}/status").read_text(encoding="utf-8")
        kib = next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(kib) / 1024


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """Both servers with nothing in them but the CRDs; the operator is not started yet."""
    policy, audit = folder / "audit-policy.yaml", folder / "audit.log"
    policy.write_text(AUDIT_POLICY, encoding="utf-8")
    flags = {"audit-policy-file": str(policy), "audit-log-path": str(audit)}
    mlflow = Mlflow(folder / "mlflow")
    with ExitStack() as stack:
        plane = stack.enter_context(
            running(ControlPlane(folder / "plane", controllers=False, apiserver_flags=flags))
        )
        stack.enter_context(running(mlflow))
        settings = {
            "FINETUNE_RESYNC_SECONDS": str(RESYNC_SECONDS),
            "FINETUNE_POLL_SECONDS": "5",
            "FINETUNE_TRACKING_URI": mlflow.uri,
            "FINETUNE_NAMESPACE": NAMESPACE,
        }
        operator = operator_process(plane.kubeconfig, folder / "operator.log", settings)
        stack.callback(operator.stop)
        bench_world = World(plane, mlflow, operator, audit)
        _install(bench_world)
        yield bench_world


def _install(bench_world: World) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for file in sorted(CRDS.glob("*.yaml")):
        bench_world.create(path, yaml.safe_load(file.read_text(encoding="utf-8")))
    bench_world.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for plural in ("finetunejobs", "modelpromotions"):
        resource = f"/apis/{API_VERSION}/{plural}"
        wait_for(plural, lambda resource=resource: bench_world.plane.client.get(resource) is not None, 60)  # type: ignore[misc]


def fill(bench_world: World, promotions: int) -> None:
    """Register models, each with a candidate, and create the promotions: two for each, one after the other."""
    models = -(-promotions // len(ALIASES))
    experiment = bench_world.mlflow.post("experiments/create", {"name": NAMESPACE})["experiment_id"]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(
            threads.map(
                lambda number: _register(bench_world.mlflow, experiment, name_of(number)), range(models)
            )
        )
    for number in range(promotions):
        bench_world.create(PATH, promotion(name_of(number // len(ALIASES)), ALIASES[number % len(ALIASES)]))


def name_of(number: int) -> str:
    """The name of a registered model."""
    return f"model-{number:04d}"


def _register(mlflow: Mlflow, experiment: str, model: str) -> None:
    tags = [{"key": TAG_EVAL_DATA, "value": NAMESPACE}]
    created = mlflow.post("runs/create", {"experiment_id": experiment, "tags": tags})
    run_id = str(created["run"]["info"]["run_id"])
    mlflow.log_metrics(run_id, **{METRIC_EVAL_LOSS: 2.0})
    version = mlflow.register(model, run_id)
    mlflow.post("registered-models/alias", {"name": model, "alias": "candidate", "version": version})


def promotion(model: str, alias: str) -> Json:
    """A promotion with a bound and a comparison, as the samples have them."""
    source = {"staging": "candidate", "champion": "staging"}[alias]
    gates = [
        {"name": "learned", "type": "Metric", "metric": {"name": METRIC_EVAL_LOSS, "max": 6}},
        {
            "name": "no-worse",
            "type": "Comparison",
            "comparison": {
                "metric": METRIC_EVAL_LOSS,
                "goal": "Minimize",
                "notWorseThan": {"relative": 0.02},
            },
        },
    ]
    return {
        "apiVersion": API_VERSION,
        "kind": "ModelPromotion",
        "metadata": {"name": f"{model}-{alias}"},
        "spec": {
            "model": model,
            "alias": alias,
            "source": {"type": "Alias", "alias": source},
            "gates": gates,
        },
    }


def settled(promotions: list[Json]) -> bool:
    """Whether each alias is where it should be."""
    return all(
        item.get("status", {}).get("phase") == "Promoted"
        and item["status"].get("observedGeneration") == item["metadata"]["generation"]
        for item in promotions
    )


def stay(seconds: float, operator: Process) -> None:
    """Watch for some time that the operator goes on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not operator.alive():
            raise RuntimeError(f"the operator ended:\n{operator.tail()}")
        time.sleep(0.5)
