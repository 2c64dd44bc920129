"""The pods of a sample with a script of its own, as processes of this machine, and what the operator reads of their run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from mlflow import MlflowClient
from mlflow.utils.proto_json_utils import message_to_json

from finetune_crds.reference import SAMPLES
from finetune_crds.status import Progress
from finetune_operator.finetunejob.model import Decision, Mlflow, Observed
from finetune_operator.mlflow.client import Client
from finetune_operator.mlflow.runs import get_run
from finetune_operator.settings import Settings
from support.forks import kill_pod
from support.ports import free_port
from support.training import Mlflow as Server
from worlds.memory.decisions import child, conclude, ftj, observed, pod, running

Json = dict[str, Any]
_SECONDS = 300


class Ended(NamedTuple):
    """How the pods of a job ended.

    Attributes:
        codes: the exit code of each.
        output: what each printed.
        progress: what the status of the job says of the run.
    """

    codes: list[int]
    output: list[str]
    progress: Progress | None


def run_sample(name: str, folder: Path, server: Server, packages: Path | None = None) -> Ended:
    """Run the pods of a sample as the operator makes them: its command, its files and its environment; no image.

    Args:
        name: the sample, of a ConfigMap with the script and a FineTuneJob.
        folder: for the files.
        server: MLflow, with the run of the job.
        packages: a folder of what its image has and this machine has not.
    """
    code, body = yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec = {"model": None, "data": None} | body["spec"]
    settings = Settings(trainer_image="trainer:1", tracking_uri=server.uri)
    codes, output = _run(
        conclude(ftj(**spec), _seen(server), settings=settings), code["data"], folder, packages
    )
    pods = [pod("tune-train-1", node) for node in range(spec["distributed"]["nodes"])]
    world = replace(observed(child("tune-train-1"), pods=pods), mlflow=_seen(server).mlflow)
    return Ended(codes, output, conclude(ftj(running(), **spec), world, settings=settings).status.progress)


def _of_node(folder: Path, node: int) -> dict[str, str]:
    """The variables that differ from pod to pod, and a home of its own for what its packages keep."""
    home = folder / f"home-{node}"
    home.mkdir()
    return {"HOME": str(home), "NODE_RANK": str(node), "PET_NODE_RANK": str(node)}


class _Store(Client):
    """Answers from a store of MLflow what a server of it would."""

    def get(self, path: str, **fields: str) -> Json:
        run = MlflowClient(self.uri).get_run(fields["run_id"])
        return {"run": json.loads(message_to_json(run.to_proto()))}


def _seen(server: Server) -> Observed:
    """What exists before the pods do: the run."""
    return observed(mlflow=Mlflow(run=get_run(_Store(server.uri), server.run_id)))


def _run(
    decision: Decision, code: dict[str, str], folder: Path, packages: Path | None
) -> tuple[list[int], list[str]]:
    """Run the pods of a decision to their end."""
    _, recipe, job = decision.apply
    (container,) = job["spec"]["template"]["spec"]["containers"]
    files = {"/etc/finetune": recipe["data"], container["workingDir"]: code}
    for number, content in enumerate(files.values()):
        (folder / str(number)).mkdir()
        for name, text in content.items():
            (folder / str(number) / name).write_text(text, encoding="utf-8")
    variables = {item["name"]: item.get("value") for item in container["env"]}
    port = str(free_port())
    machine = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # NB: without the packages of this repository: a script has no more than its image gives it.
        **({"PYTHONPATH": str(packages)} if packages else {}),
        "PYTHONWARNINGS": "ignore",
        # NB: torchrun leaves its logs there.
        "TMPDIR": str(folder),
        **dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "127.0.0.1"),
        **dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), port),
        "GLOO_SOCKET_IFNAME": "lo",
        # NB: the pods share the cores of this machine.
        "OMP_NUM_THREADS": "1",
    }
    placed = {
        name: next(
            (f"{folder}/{at}{value[len(path) :]}" for at, path in enumerate(files) if value.startswith(path)),
            value,
        )
        for name, value in variables.items()
        if value is not None
    }
    nodes = job["spec"]["completions"]
    started = [
        subprocess.Popen(
            [*container["command"], *container.get("args", [])],
            cwd=folder / "1",
            env=placed | machine | _of_node(folder, node),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    try:
        output = [process.communicate(timeout=_SECONDS)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                kill_pod(process.pid)
                process.communicate()
    return [process.returncode for process in started], output
