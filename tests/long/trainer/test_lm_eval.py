"""The sample lm-eval: a task of your own in the real lm-evaluation-harness, as the command of an evaluation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.evaluation import Evaluation
from finetune_crds.reference import SAMPLES
from finetune_operator.finetunejob.decide import evaluation_result
from finetune_trainer.evaluate import standalone
from support import networks
from support.cells import WARNINGS
from support.evaluations import save_adapter

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
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
