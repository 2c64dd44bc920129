"""A real MLflow server, on a database whose tables exist already: as a process, or in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from filelock import FileLock

from support.cache import cache
from support.forked_process import UVICORN, ForkedProcess
from support.http_server import Answer, Request, serving
from support.ports import free_port
from support.process import Process
from support.waiting import wait_for

Json = dict[str, Any]
_QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "GIT_PYTHON_REFRESH": "quiet"}
_MIGRATE = (
    "import sys; from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore; "
    "SqlAlchemyStore(f'sqlite:///{sys.argv[1]}', 'mlflow-artifacts:/')"
)


def migrated_database() -> Path:
    """An empty SQLite database of the installed MLflow, to be copied: its migrations take seconds.

    It is made once a machine, and once for each version of MLflow.
    """
    template = cache() / "mlflow" / f"{version('mlflow')}.db"
    template.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(template.with_suffix(".lock")):
        if not template.exists():
            unfinished = template.with_suffix(".new")
            unfinished.unlink(missing_ok=True)
            command = [sys.executable, "-W", "ignore", "-c", _MIGRATE, str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **_QUIET})
            unfinished.rename(template)
    return template


# The handlers of MLflow's server use the stores of the process.
_STORES_LOCK = threading.Lock()


@contextmanager
def serving_here(folder: Path) -> Iterator[Mlflow]:
    """Serve runs and registered models with MLflow's handlers in this process, without the seconds of a process's start."""
    with warnings.catch_warnings():
        # NB: MLflow's modules warn about each other while they are imported.
        warnings.simplefilter("ignore")
        from mlflow.server import app, handlers
        from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking

        database = f"sqlite:///{shutil.copyfile(migrated_database(), folder / 'mlflow.db')}"
        stores = {
            "_tracking_store": Tracking(database, "mlflow-artifacts:/"),
            "_model_registry_store": Registry(database),
        }
    client = app.test_client()

    def respond(request: Request) -> Answer:
        headers = {"Content-Type": "application/json"}
        with _STORES_LOCK:
            vars(handlers).update(stores)
            answer = client.open(request.target, method=request.method, data=request.body, headers=headers)
        return Answer(answer.status_code, answer.get_data())

    try:
        with serving(respond) as address:
            yield Mlflow(folder, port=urlsplit(address).port or 0)
    finally:
        with _STORES_LOCK:
            vars(handlers).update(dict.fromkeys(stores))
        for store in stores.values():
            store._dispose_engine()


@dataclass
class Mlflow:
    """A real MLflow server in a folder, on a database in a file unless another one is given."""

    folder: Path
    database: str = ""
    """Its address, as MLflow's --backend-store-uri takes it."""
    port: int = field(default_factory=free_port)
    allowed_hosts: str = ""
    """Names the server answers to, as MLflow's --allowed-hosts takes them; empty for its default."""
    artifacts: str = ""
    """Where it keeps artifacts, as MLflow's --artifacts-destination takes it; empty for a folder of its own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables, such as a login to the store of its artifacts."""
    forked: bool = False
    """Whether it starts as a fork (support.forked_process), for a test that starts servers of its own."""
    _process: Process | None = None

    @property
    def pid(self) -> int:
        """Its process id while it runs."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What the server prints: among other things a line for each request."""
        return self.folder / "mlflow.log"

    def start(self) -> None:
        # NB: `mlflow server` imports MLflow twice, and leaves its uvicorn behind when it is killed: start uvicorn alone.
        options = ["--host", "127.0.0.1", "--port", str(self.port), "mlflow.server.fastapi_app:app"]
        database = self.database or self._own_database()
        environment = {
            **_QUIET,
            "_MLFLOW_SERVER_FILE_STORE": database,
            "_MLFLOW_SERVER_REGISTRY_STORE": database,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": self.artifacts or str(self.folder / "artifacts"),
            **self.environment,
        }
        if self.allowed_hosts:
            environment["MLFLOW_SERVER_ALLOWED_HOSTS"] = self.allowed_hosts
        self._process = (
            ForkedProcess("mlflow", [UVICORN, *options], self.log, environment)
            if self.forked
            else Process("mlflow", [sys.executable, "-m", "uvicorn", *options], self.log, environment)
        )
        self._process.start()
        wait_for("MLflow answers", self._answers, 120, self._process)

    def _own_database(self) -> str:
        file = self.folder / "mlflow.db"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(migrated_database(), file)
        return f"sqlite:///{file}"

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
        """The runs of a FineTuneJob."""
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
