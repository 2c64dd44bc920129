"""One-time runs of the stand-in workspace. The wheel of a run is installed and run, in a process with a local Spark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from databricks.sdk.service.jobs import (
    BaseRun,
    JobEnvironment,
    Run,
    RunLifecycleStateV2State,
    RunOutput,
    RunStatus,
    RunTask,
    RunType,
    SubmitTask,
    TerminationCodeCode,
    TerminationDetails,
    TerminationTypeType,
)

from standins.databricks.files import FileRefusal, Files

Json = dict[str, Any]
_Life, _Code = RunLifecycleStateV2State, TerminationCodeCode
_RUNNER = Path(__file__).with_name("runner.py")
_ACTIVE = (_Life.BLOCKED, _Life.PENDING, _Life.QUEUED, _Life.RUNNING, _Life.TERMINATING, _Life.WAITING)
_MANY = "Retrieving the output of runs with multiple tasks is not supported. Please retrieve the output of each individual task run instead."


class JobRefusal(Exception):  # noqa: N818
    """A run cannot be submitted or found: HTTP status, error code, message."""


@dataclass
class Submitted:
    """A run that was submitted.

    Attributes:
        task: its one task, as the SDK's class has it.
        wheel: path of its wheel in the workspace.
    """

    run_id: int
    name: str
    token: str
    task: SubmitTask
    wheel: str
    life: RunLifecycleStateV2State = _Life.PENDING
    code: TerminationCodeCode | None = None
    message: str = ""
    error: str = ""
    process: subprocess.Popen[bytes] | None = None


@dataclass
class Jobs:
    """The runs by id.

    Attributes:
        files: of the workspace, with the volumes.
        folder: for the installed wheels and the scratch of runs.
        issue: gives the token with which a run asks its workspace.
        clusters: ids of the clusters that exist.
        runs_wheels: whether runs run; else they stay Pending until `end` is called.
        tables: location of each table, by its name.
        buckets: folder of each bucket.
        conf: settings of every session, as a workspace has them for its external locations.
        environment: variables of every cluster, as its policy sets them.
        jars: those of Delta, which a cluster has.
        uri: of the workspace.
    """

    files: Files
    folder: Path
    issue: Callable[[], str]
    clusters: set[str] = field(default_factory=set)
    runs_wheels: bool = True
    tables: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, str] = field(default_factory=dict)
    conf: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    jars: str = ""
    uri: str = ""
    held: dict[int, Submitted] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def submit(self, body: Json) -> Json:
        """POST of a one-time run. Equal tokens give one run."""
        token = str(body.get("idempotency_token", ""))
        if len(token) > 64:
            raise _wrong("idempotency_token must have at most 64 characters.")
        with self._lock:
            submitted = next((run for run in self.held.values() if token and run.token == token), None)
            if submitted is None:
                task, wheel = self._checked(body)
                number = 10_000 + 10 * len(self.held)
                submitted = Submitted(number, body.get("run_name", "Untitled"), token, task, wheel)
                self.held[number] = submitted
                if self.runs_wheels:
                    threading.Thread(target=self._run, args=(submitted,), daemon=True).start()
            return {"run_id": submitted.run_id}

    def get(self, run_id: int) -> Json:
        """GET of a run, with its tasks."""
        run = self._find(run_id)
        task = RunTask(task_key=run.task.task_key, run_id=run.run_id + 1, status=_status(run))
        return Run(
            run_id=run.run_id,
            run_name=run.name,
            run_type=RunType.SUBMIT_RUN,
            run_page_url=f"{self.uri}/?o=1234#job/0/run/{run.run_id}",
            status=_status(run),
            tasks=[task],
        ).as_dict()

    def output(self, run_id: int) -> Json:
        """GET of what the run of one task put out."""
        if run_id in self.held:
            raise _wrong(_MANY)
        run = self._find(run_id - 1)
        return RunOutput(error=run.error or None, logs="", logs_truncated=False).as_dict()

    def list(self, query: Mapping[str, str]) -> Json:
        """GET of runs, the newest first."""
        active = query.get("active_only") == "true"
        runs = [run for run in reversed(self.held.values()) if not active or run.life in _ACTIVE]
        listed = [BaseRun(run_id=run.run_id, run_name=run.name, status=_status(run)) for run in runs]
        return {"runs": [item.as_dict() for item in listed], "has_more": False}

    def cancel(self, run_id: int) -> Json:
        """POST: a run ends some time later."""
        with self._lock:
            run = self._find(run_id)
            if run.life in _ACTIVE:
                run.life = _Life.TERMINATING
                if run.process:
                    run.process.kill()
            return {}

    def end(self, run_id: int, code: TerminationCodeCode, message: str = "", error: str = "") -> None:
        """Play the cluster: a run has ended."""
        with self._lock:
            run = self._find(run_id)
            run.life, run.code, run.message, run.error = _Life.TERMINATED, code, message, error

    def stop(self) -> None:
        """End what still runs."""
        for run in self.held.values():
            if run.process:
                run.process.kill()
                run.process.wait()

    def _find(self, run_id: int) -> Submitted:
        if run_id not in self.held:
            raise _wrong(f"Run {run_id} does not exist.")
        return self.held[run_id]

    def _checked(self, body: Json) -> tuple[SubmitTask, str]:
        """The task of a run, and its wheel."""
        tasks = body.get("tasks") or []
        if len(tasks) != 1:
            raise _wrong("This workspace has runs of one task.")
        task = SubmitTask.from_dict(tasks[0])
        if task.as_dict() != tasks[0]:
            raise JobRefusal(400, "MALFORMED_REQUEST", f"Could not parse request object: {tasks[0]}")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", task.task_key):
            raise _wrong(f"Task key {task.task_key} is not valid.")
        wheel = task.python_wheel_task
        if wheel is None or not (wheel.package_name and wheel.entry_point):
            raise _wrong("python_wheel_task must have package_name and entry_point.")
        if wheel.parameters and wheel.named_parameters:
            raise _wrong("Only one of parameters and named_parameters can be set.")
        return task, self._environment(task, body) if task.environment_key else self._cluster(task)

    def _cluster(self, task: SubmitTask) -> str:
        """The wheel of a task on a cluster."""
        if bool(task.new_cluster) == bool(task.existing_cluster_id):
            raise _wrong("Exactly one of new_cluster, existing_cluster_id and environment_key must be set.")
        if task.existing_cluster_id and task.existing_cluster_id not in self.clusters:
            raise _wrong(f"Cluster {task.existing_cluster_id} does not exist")
        cluster = task.new_cluster
        if cluster and not (cluster.spark_version and (cluster.node_type_id or cluster.instance_pool_id)):
            raise _wrong("new_cluster must have spark_version, and node_type_id or instance_pool_id.")
        if cluster and cluster.node_type_id and cluster.instance_pool_id:
            raise _wrong("node_type_id cannot be set with instance_pool_id.")
        wheels = [library.whl for library in task.libraries or [] if library.whl]
        if len(wheels) != 1:
            raise _wrong("python_wheel_task needs its wheel as a library.")
        return str(wheels[0])

    def _environment(self, task: SubmitTask, body: Json) -> str:
        """The wheel of a task on serverless compute."""
        if task.libraries or task.new_cluster or task.existing_cluster_id:
            raise _wrong("A task with environment_key cannot have libraries or a cluster.")
        environments = [JobEnvironment.from_dict(item) for item in body.get("environments") or []]
        spec = next(
            (item.spec for item in environments if item.environment_key == task.environment_key), None
        )
        if spec is None:
            raise _wrong(f"Environment {task.environment_key} is not defined.")
        if bool(spec.environment_version) == bool(spec.base_environment):
            raise _wrong("Either environment_version or base_environment must be provided.")
        wheels = [item for item in spec.dependencies or [] if item.endswith(".whl")]
        if len(wheels) != 1:
            raise _wrong("This workspace installs one wheel.")
        return str(wheels[0])

    def _run(self, run: Submitted) -> None:
        """Play the cluster: install the wheel, and run its entry point."""
        folder = self.folder / str(run.run_id)
        installed, error = folder / "installed", folder / "error.txt"
        folder.mkdir(parents=True)
        (folder / "scratch").mkdir()
        try:
            wheel = folder / Path(run.wheel).name
            wheel.write_bytes(self.files.read(run.wheel))
            pip = [
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-index",
                "--target",
                str(installed),
                str(wheel),
            ]
            subprocess.run([sys.executable, *pip], check=True, capture_output=True)
        except (FileRefusal, subprocess.CalledProcessError) as refusal:
            self.end(run.run_id, _Code.LIBRARY_INSTALLATION_ERROR, f"Library installation failed: {refusal}")
            return
        assert run.task.python_wheel_task
        wheel_task = run.task.python_wheel_task
        cluster = run.task.new_cluster
        task = {
            "installed": str(installed),
            "package": wheel_task.package_name,
            "entry_point": wheel_task.entry_point,
            "parameters": wheel_task.parameters or [],
            "volumes": str(self.files.folder),
            "buckets": self.buckets,
            "tables": self.tables,
            "jars": self.jars,
            "conf": self.conf | ((cluster.spark_conf if cluster else None) or {}),
            "scratch": str(folder / "scratch"),
            "error": str(error),
            "host": self.uri,
            "token": self.issue(),
        }
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        names = ("PATH", "HOME", "JAVA_HOME", "LANG", "JDK_JAVA_OPTIONS")
        machine = {name: os.environ[name] for name in names if name in os.environ}
        environment = machine | {
            "PYTHONPATH": str(installed),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            **self.environment,
            **((cluster.spark_env_vars if cluster else None) or {}),
        }
        with self._lock:
            if run.life != _Life.PENDING:
                run.life, run.code = _Life.TERMINATED, _Code.USER_CANCELED
                return
            log = (folder / "log.txt").open("wb")
            run.process = subprocess.Popen(
                [sys.executable, str(_RUNNER), str(folder / "task.json")],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            run.life = _Life.RUNNING
        failed = run.process.wait() != 0
        log.close()
        if run.life == _Life.TERMINATING:
            self.end(run.run_id, _Code.USER_CANCELED, "Run cancelled.")
        elif failed:
            error_text = error.read_text(encoding="utf-8") if error.exists() else ""
            self.end(
                run.run_id,
                _Code.RUN_EXECUTION_ERROR,
                "Workload failed, see run output for details",
                error_text,
            )
        else:
            self.end(run.run_id, _Code.SUCCESS)


def _wrong(message: str) -> JobRefusal:
    return JobRefusal(400, "INVALID_PARAMETER_VALUE", message)


def _status(run: Submitted) -> RunStatus:
    ended = None
    if run.code is not None:
        kind = TerminationTypeType.SUCCESS if run.code == _Code.SUCCESS else TerminationTypeType.CLIENT_ERROR
        ended = TerminationDetails(code=run.code, message=run.message, type=kind)
    return RunStatus(state=run.life, termination_details=ended)
