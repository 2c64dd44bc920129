"""The samples with the real lm-evaluation-harness: a task of your own as the command of an evaluation, tasks of the Hub as a gate's Job."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from finetune_crds.evaluation import Evaluation
from finetune_crds.gates import JobGate
from finetune_crds.promotion_status import GateResult
from finetune_crds.reference import SAMPLES
from finetune_operator.finetunejob.decide import evaluation_result
from finetune_operator.modelpromotion.decide.gate_result import build_result
from finetune_operator.modelpromotion.model import ObservedJob
from finetune_trainer.evaluate import standalone
from finetune_trainer.train.runtime.distributed import World
from fixtures.fake_hub import Hub, Repository
from support import networks
from support.cells import WARNINGS
from support.evaluations import save_adapter
from support.gate_jobs import read_job, register_version
from support.http_server import serving
from support.pods import Pod
from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
ROOT = Path(__file__).parents[3]
HARNESS = ROOT / "build/lm-eval/bin"
SECONDS = 600


def part(kind: str) -> Any:
    """The object of a kind in the sample."""
    parts = yaml.safe_load_all((SAMPLES / "lm-eval.yaml").read_text(encoding="utf-8"))
    return next(part for part in parts if part["kind"] == kind)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """The folder of the ConfigMap."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in part("ConfigMap")["data"].items():
        (folder / name).write_text(text.replace("/tasks", str(folder)), encoding="utf-8")
    return folder


def test_the_example_writes_the_accuracy_of_a_merged_adapter(
    base_model: Path, tmp_path: Path, tasks: Path
) -> None:
    model, metrics = tmp_path / "model", tmp_path / "metrics.json"
    (model / ".fetched").mkdir(parents=True)
    adapter = save_adapter(base_model, tmp_path / "adapter")
    standalone.write(networks.recipe(base_model, method={"type": "LoRA"}), str(adapter), model)
    evaluation = Evaluation.model_validate(part("FineTuneJob")["spec"]["evaluation"])
    arguments = [item.replace("/tasks", str(tasks)) for item in evaluation.args]
    parameters = tmp_path / "parameters.yaml"
    parameters.write_text(yaml.safe_dump(evaluation.parameters), encoding="utf-8")
    environment = {
        "PATH": f"{HARNESS}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "MODEL_PATH": str(model),
        "METRICS_PATH": str(metrics),
        "HYPERPARAMETERS_PATH": str(parameters),
    }
    subprocess.run([*evaluation.command, *arguments], env=environment, check=True, timeout=SECONDS)
    assert json.loads(metrics.read_text("utf-8"))["intents_acc"] in (0.0, 0.5, 1.0)
    evaluated = evaluation_result.from_command(metrics.read_text("utf-8"), "d1")
    assert [item.name for item in evaluated.metrics or []] == ["intents_acc"]


# The kubelet keeps so many bytes of the log of a container without a termination message.
LOG_BYTES = 2048
_SPLITS = ("train", "validation", "test")
_CONFIGS = [
    {"config_name": name, "data_files": [{"split": split, "path": f"{split}.jsonl"} for split in _SPLITS]}
    for name in ("ARC-Easy", "ARC-Challenge")
]


def hub() -> Hub:
    """The data sets of the tasks of the sample."""
    colors = {"text": ["red", "blue"], "label": ["A", "B"]}
    arc = _lines({"question": f"What is {n}?", "choices": colors, "answerKey": "AB"[n % 2]} for n in range(4))
    piqa = _lines({"goal": f"Paint {n}", "sol1": "red", "sol2": "blue", "label": n % 2} for n in range(4))
    card = f"---\n{yaml.safe_dump({'configs': _CONFIGS})}---\n"
    return Hub(
        {
            "allenai/ai2_arc": Repository(
                {"README.md": card.encode(), **{f"{split}.jsonl": arc for split in _SPLITS}}
            ),
            "baber/piqa": Repository({f"{split}.jsonl": piqa for split in ("train", "validation")}),
        }
    )


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def run_gate(job: JobGate, environment: dict[str, str], folder: Path) -> GateResult:
    """Run the Job of a gate as its container, and return the result that the operator reads from its pod."""
    metrics = folder / "termination-log"
    # NB: in the pod, this folder is empty.
    script = job.args[0].replace("/tmp/version", str(folder / "version"))
    done = subprocess.run(
        [*job.command, script],
        env={
            "PATH": f"{HARNESS}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "METRICS_PATH": str(metrics),
            **{item.name: item.value for item in job.env if item.value},
            **environment,
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    log = (done.stdout + done.stderr).encode()[-LOG_BYTES:].decode(errors="replace")
    message = metrics.read_text("utf-8") if metrics.exists() else log if done.returncode else ""
    terminated = {"exitCode": done.returncode, "reason": "Error" if done.returncode else "Completed"}
    pod = {
        "metadata": {"name": "gate-0"},
        "status": {
            "containerStatuses": [
                {"name": "main", "state": {"terminated": terminated | {"message": message}}}
            ]
        },
    }
    condition = {"type": "Failed" if done.returncode else "Complete", "status": "True"}
    body = {"metadata": {"name": "gate", "namespace": "team"}, "status": {"conditions": [condition]}}
    return build_result(
        ObservedJob(body, (pod,)), job, version="1", digest="d", used_numbers=(), now=datetime.now(UTC)
    )


class Gate(NamedTuple):
    """A run of the Job, and its result.

    Attributes:
        environment: variables that replace those of the sample.
        message_end: the end of what the status says.
    """

    environment: dict[str, str]
    outcome: str
    numbers: list[str]
    message_end: str = ""


GATES = {
    "the tasks of the sample": Gate({}, "Succeeded", ["arc_easy", "piqa"]),
    "a group of tasks": Gate({"TASKS": "ai2_arc"}, "Succeeded", ["arc_challenge", "arc_easy"]),
    "a task of your own": Gate({"TASKS": "/tasks/intents.yaml"}, "Succeeded", ["intents"]),
    "an unknown task": Gate(
        {"TASKS": "arc_easi"},
        "Failed",
        [],
        "KeyError: \"Spec 'arc_easi' is not a registered task/group/tag name or valid YAML path\"",
    ),
}


@pytest.fixture
def version(pod: Pod, base_model: Path, world: World, mlflow: Mlflow) -> str:
    return register_version(pod, base_model, world, mlflow)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_runs_tasks_of_the_hub_on_a_version(
    version: str, mlflow: Mlflow, tmp_path: Path, tasks: Path, name: str
) -> None:
    gate = GATES[name]
    own = {variable: value.replace("/tasks", str(tasks)) for variable, value in gate.environment.items()}
    with serving(hub()) as address:
        environment = {"MODEL_URI": version, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
        job = read_job("promotion-gate-lm-eval")
        result = run_gate(job, mlflow.env | environment | own, tmp_path)
    assert (result.outcome, [*result.metrics]) == (gate.outcome, gate.numbers), result
    assert all(float(number) in (0.0, 0.25, 0.5, 0.75, 1.0) for number in result.metrics.values())
    assert (result.message or "").endswith(gate.message_end)
