"""The scripts of the samples with gates of type Job: each runs as its container does, against a version of the trainer in MLflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from transformers import AutoTokenizer

from support.cells import WARNINGS
from support.gate_jobs import SAMPLES, read_job, register_version
from support.http_server import Answer, Request, serving
from support.reward_models import save_reward_model
from support.training import new_run

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.gates import JobGate
    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture
def version(pod: Pod, base_model: Path, world: World, mlflow: Mlflow) -> str:
    return register_version(pod, base_model, world, mlflow)


def run_job(job: JobGate, environment: dict[str, str], script: str | None = None) -> None:
    """Run the command of a Job with the variables that the operator sets in its container."""
    assert job.command == ["python", "-c"]
    command = [sys.executable, "-c", script or job.args[0]]
    short = {"MLFLOW_PYFUNC_INFERENCE_CONFIG": json.dumps({"max_new_tokens": 4})}
    environment = {**os.environ, **short, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reward_model_judges_the_answers(
    version: str, mlflow: Mlflow, base_model: Path, tmp_path: Path
) -> None:
    judge, metrics = save_reward_model(base_model, tmp_path / "judge"), tmp_path / "metrics.json"
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(judge)
    job = read_job("promotion-gate-reward")
    assert [item.name for item in job.env] == ["REWARD_MODEL"]
    own = {"MODEL_URI": version, "METRICS_PATH": str(metrics), "REWARD_MODEL": str(judge)}
    run_job(job, mlflow.env | own)
    (reward,) = json.loads(metrics.read_text(encoding="utf-8")).values()
    assert reward != 0


def test_a_language_model_judges_the_answers(version: str, mlflow: Mlflow, tmp_path: Path) -> None:
    _, config = yaml.safe_load_all((SAMPLES / "promotion-gate-judge.yaml").read_text(encoding="utf-8"))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(config["data"]["prompts.json"], encoding="utf-8")
    requests: list[tuple[str, str | None, dict[str, Any]]] = []

    def rate(request: Request) -> Answer:
        requests.append((request.target, request.headers["Authorization"], json.loads(request.body)))
        return Answer(200, {"choices": [{"message": {"content": f" {len(requests) + 2}"}}]})

    job = read_job("promotion-gate-judge")
    path = "/prompts/prompts.json"
    assert job.args[0].count(path) == 1
    run = new_run(mlflow.uri, tmp_path / "gate")
    with serving(rate) as address:
        own = {"MODEL_URI": version, "JUDGE_URL": address, "JUDGE_KEY": "key", "JUDGE_MODEL": "judge-1"}
        run_job(job, run.env | own, job.args[0].replace(path, str(prompts)))
    assert [(target, key, body["model"]) for target, key, body in requests] == [
        ("/chat/completions", "Bearer key", "judge-1")
    ] * 2
    texts = [body["messages"][0]["content"] for _, _, body in requests]
    for text, prompt in zip(texts, json.loads(prompts.read_text(encoding="utf-8")), strict=True):
        assert f"Prompt: {prompt}\n\nAnswer: " in text
    # The gate reads the metrics of the Job's run.
    assert run.client().get_run(run.run_id).data.metrics == {"judge_mean": 3.5, "judge_worst": 3.0}
    assert list((tmp_path / "gate").rglob("ratings.json"))
