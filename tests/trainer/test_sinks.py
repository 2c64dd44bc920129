"""TensorBoard and W&B beside MLflow: whole runs and their trackers, and a tracker that is away."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds import contract
from finetune_trainer.sinks import feed
from finetune_trainer.train.loop import Loop
from fixtures.operator_in_memory.decisions import UID
from fixtures.operator_processes.scripts import run_sample
from support.trackers import read_event_texts, read_events, read_wandb
from support.training import history

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod
    from support.training import Mlflow

# MLflow modules warn about each other while the export imports them.
pytestmark = pytest.mark.usefixtures("mlflow_imported")

WANDB = {"type": "WandB", "project": "support", "entity": "team", "secretRef": {"name": "wandb"}}


def rounded(values: dict[int, float]) -> list[tuple[int, float]]:
    """Values as TensorBoard has them: numbers of 32 bits."""
    return [(step, float(np.float32(value))) for step, value in sorted(values.items())]


def test_two_attempts_are_one_run_in_tensorboard_and_wandb_with_the_metrics_of_mlflow(
    pod: Pod,
    mlflow_of_test: Mlflow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "events"
    pod = pod.but(
        {
            "tracking.sinks": [{"type": "TensorBoard", "uri": str(folder)}, WANDB],
            "tracking.runName": "first try",
            "training.evalEverySteps": 2,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 3},
        }
    )
    pod.env |= {"MLFLOW_RUN_ID": mlflow_of_test.run_id, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}

    # The first attempt takes five steps, and loses the last two.
    with monkeypatch.context() as patch:
        train_step: Any = Loop._train_step

        def die_at_step_6(loop: Loop) -> bool:
            if loop.progress.step == 5:
                raise RuntimeError("the node is lost")
            stop: bool = train_step(loop)
            return stop

        patch.setattr(Loop, "_train_step", die_at_step_6)
        assert pod.run_here(capsys).code == 1
    (events,) = folder.iterdir()
    assert [step for step, _ in read_events(events)["loss"]] == [1, 2, 3, 4, 5]
    pod.env[contract.ENV_ATTEMPT] = "2"
    outcome = pod.run_here(capsys)
    assert (outcome.code, list(outcome.losses)) == (0, [4, 5, 6]), outcome.output

    # TensorBoard: each step once, over both attempts.
    scalars = read_events(events)
    names = ("loss", "learning_rate", "grad_norm", "eval_loss", "final_eval_loss", "base_eval_loss")
    assert {name: scalars[name] for name in names} == {
        name: rounded(history(mlflow_of_test, name)) for name in names
    }
    assert not scalars.keys() & {contract.METRIC_STEP, contract.METRIC_MAX_STEPS}
    assert [file.name.split(".")[4:] for file in sorted(events.iterdir())] == [
        ["tiny", "attempt-1", "0000"],
        ["tiny", "attempt-2", "0000"],
    ]
    assert "| learning_rate | 0.005 |" in read_event_texts(events)["parameters"]

    # W&B: one run. What the second attempt repeats, its server drops; an offline run has no server.
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    losses: dict[int, float] = {}
    for file in files:
        rows, summary, record = read_wandb(file)
        losses |= {step: row["loss"] for step, row in rows if "loss" in row}
        run = record.run
        assert (run.run_id, run.project, run.entity, run.display_name, run.resume) == (
            pod.recipe["job"]["uid"],
            "support",
            "team",
            "first try",
            True,
        )
    assert losses == history(mlflow_of_test, "loss")
    assert summary["final_eval_loss"] == history(mlflow_of_test, "final_eval_loss")[6]


def test_a_tracker_that_never_answers_delays_no_step(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feed, "_PATIENCE_SECONDS", 2.0)
    pod = pod.but({"tracking.sinks": [WANDB]})
    delays: list[float] = []
    log_metrics = feed.Sinks.metrics

    def measure(*args: Any, **options: Any) -> None:
        started = time.perf_counter()
        log_metrics(*args, **options)
        delays.append(time.perf_counter() - started)

    monkeypatch.setattr(feed.Sinks, "metrics", measure)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        pod.env |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
        outcome = pod.run_here(capfd)
    assert (outcome.code, list(outcome.losses)) == (0, [1, 2, 3, 4, 5, 6]), outcome.output
    assert outcome.output.endswith("W&B did not take all metrics in time: the last ones are lost\n")
    # A report costs no more than putting it into a queue; a request would take 30 s.
    assert len(delays) >= len(outcome.losses)
    assert max(delays) < 1.0


def test_an_own_script_on_the_trainer_of_transformers_finds_the_sinks(
    tmp_path: Path, mlflow_of_test: Mlflow
) -> None:
    env = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "events"),
    }
    ended = run_sample("own-script-trackers", tmp_path, mlflow_of_test, env=env)
    assert ended.codes == [0], ended.output
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, _summary, record = read_wandb(file)
    # The Trainer logs its steps as a metric.
    losses = {int(row["train/global_step"]): row["train/loss"] for _, row in rows if "train/loss" in row}
    assert [*losses] == [5, 10, 15, 20]
    run = record.run
    assert (run.run_id, run.project, run.display_name, run.resume) == (UID, "counting", "tune", True)
    assert read_events(tmp_path / "events")["train/loss"] == rounded(losses)
