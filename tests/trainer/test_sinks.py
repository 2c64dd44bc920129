"""TensorBoard and W&B beside MLflow: whole runs and their trackers, and a tracker that is away."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds import contract
from finetune_trainer.sinks import feed
from finetune_trainer.sinks.entries import Metrics, Settings, encode
from finetune_trainer.train.loop import Loop
from fixtures import fake_wandb
from fixtures.operator_in_memory.decisions import UID
from fixtures.operator_processes.scripts import run_sample
from support.trackers import read_event_texts, read_events, read_wandb
from support.training import history

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixtures.fake_wandb import FakeWandb
    from support.pods import Pod
    from support.training import Mlflow

# MLflow modules warn about each other while the export imports them.
pytestmark = pytest.mark.usefixtures("mlflow_imported")

KEY = "0" * 40
WANDB = {"type": "WandB", "project": "support", "entity": "team", "secretRef": {"name": "wandb"}}


def rounded(values: dict[int, float]) -> list[tuple[int, float]]:
    """Values as TensorBoard has them: numbers of 32 bits."""
    return [(step, float(np.float32(value))) for step, value in sorted(values.items())]


def call_after_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Call a function in the training loop after this step."""
    train_step: Any = Loop._train_step

    def act_and_train(loop: Loop) -> bool:
        if loop.progress.step == step:
            action()
        stop: bool = train_step(loop)
        return stop

    patch.setattr(Loop, "_train_step", act_and_train)


def lose_node() -> None:
    """End the training as the loss of a node does."""
    raise RuntimeError("the node is lost")


def measure_reports(patch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the seconds that each report to the sinks takes the rank."""
    seconds: list[float] = []
    log_metrics = feed.Sinks.metrics

    def measure(*args: Any, **options: Any) -> None:
        started = time.perf_counter()
        log_metrics(*args, **options)
        seconds.append(time.perf_counter() - started)

    patch.setattr(feed.Sinks, "metrics", measure)
    return seconds


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
        call_after_step(patch, 5, lose_node)
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
    delays = measure_reports(monkeypatch)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        pod.env |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
        outcome = pod.run_here(capfd)
    assert (outcome.code, list(outcome.losses)) == (0, [1, 2, 3, 4, 5, 6]), outcome.output
    assert outcome.output.endswith("W&B did not take all metrics in time: the last ones are lost\n")
    # A report costs no more than putting it into a queue; a request would take 30 s.
    assert len(delays) >= len(outcome.losses)
    assert max(delays) < 1.0


def test_a_server_of_wandb_has_one_run_for_two_attempts(
    pod: Pod,
    mlflow_of_test: Mlflow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pod = pod.but(
        {
            "tracking": {"sinks": [WANDB], "runName": "first try"},
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 3},
        }
    )
    with fake_wandb.running(KEY) as server:
        pod.env |= connect(server, tmp_path) | {"MLFLOW_RUN_ID": mlflow_of_test.run_id}
        with monkeypatch.context() as patch:
            call_after_step(patch, 5, lose_node)
            assert pod.run_here(capfd).code == 1
        (run,) = server.runs.values()
        assert [line["_step"] for line in run.history.values() if "loss" in line] == [1, 2, 3, 4, 5]
        pod.env[contract.ENV_ATTEMPT] = "2"
        outcome = pod.run_here(capfd)
    assert (outcome.code, list(outcome.losses)) == (0, [4, 5, 6]), outcome.output
    assert "W&B" not in outcome.output

    # The run is found by the uid of the job, and each step is in its history once.
    assert server.operations.count("RunResumeStatus") == 2
    ((key, run),) = server.runs.items()
    assert (key, run.display_name) == (("team", "support", pod.recipe["job"]["uid"]), "first try")
    losses = history(mlflow_of_test, "loss")
    lines = [(line["_step"], line["loss"]) for line in run.history.values() if "loss" in line]
    assert lines == sorted(losses.items())
    assert run.config["learning_rate"]["value"] == pytest.approx(5e-3)
    assert run.summary["final_eval_loss"] == history(mlflow_of_test, "final_eval_loss")[6]
    assert run.exit_codes == [1, 0]


def test_a_server_of_wandb_that_goes_away_delays_no_step(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feed, "_PATIENCE_SECONDS", 2.0)
    pod = pod.but({"tracking.sinks": [WANDB]})
    delays = measure_reports(monkeypatch)
    with fake_wandb.running(KEY) as server:

        def go_away() -> None:
            assert server.is_registered.wait(60)
            server.is_away = True

        call_after_step(monkeypatch, 2, go_away)
        pod.env |= connect(server, tmp_path)
        outcome = pod.run_here(capfd)
    assert (outcome.code, list(outcome.losses)) == (0, [1, 2, 3, 4, 5, 6]), outcome.output
    assert outcome.output.endswith("W&B did not take all metrics in time: the last ones are lost\n")
    ((_, run),) = server.runs.items()
    assert run.exit_codes == []
    assert len(delays) >= len(outcome.losses)
    assert max(delays) < 1.0


def test_a_server_of_wandb_that_comes_back_gets_every_step(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pod = pod.but({"tracking.sinks": [WANDB]})
    with fake_wandb.running(KEY) as server:

        def go_away() -> None:
            assert server.is_registered.wait(60)
            server.is_away = True

        def come_back() -> None:
            assert server.was_away.wait(60)
            server.is_away = False

        call_after_step(monkeypatch, 2, go_away)
        call_after_step(monkeypatch, 4, come_back)
        pod.env |= connect(server, tmp_path)
        outcome = pod.run_here(capfd)
    assert outcome.code == 0, outcome.output
    (run,) = server.runs.values()
    steps = [line["_step"] for line in run.history.values() if "loss" in line]
    assert (steps, run.exit_codes) == ([1, 2, 3, 4, 5, 6], [0])
    assert "W&B" not in outcome.output


@pytest.mark.parametrize(
    ("key", "forbidden_operations", "reason"),
    [
        ("1" * 40, frozenset(), "invalid API key"),
        (KEY, frozenset({"RunResumeStatus"}), "permission denied"),
        (KEY, frozenset({"UpsertBucket"}), "permission denied"),
    ],
    ids=["another key", "no access to the project", "no right to write"],
)
def test_a_refusal_of_a_server_of_wandb_ends_the_sink(
    tmp_path: Path, key: str, forbidden_operations: frozenset[str], reason: str
) -> None:
    settings = Settings("WandB", "support", "0123-4567", "first try", "attempt-1", entity="team")
    lines = [settings.encode(), encode(Metrics(1, 1.0, {"loss": 2.0}))]
    with fake_wandb.running(KEY) as server:
        server.forbidden_operations = forbidden_operations
        # The rank keeps the pipe open: the process ends by itself.
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune_trainer.sinks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | connect(server, tmp_path) | {"WANDB_API_KEY": key},
            text=True,
        )
        with process:
            assert process.stdin
            assert process.stdout
            try:
                process.stdin.write("".join(f"{line}\n" for line in lines))
                process.stdin.flush()
                message = process.stdout.readline()
                assert message.startswith(
                    "W&B's project support refuses the metrics; the job goes on without it: "
                )
                assert reason in message
                assert process.wait(60) == 0
            finally:
                process.kill()
    assert server.runs == {}


def connect(server: FakeWandb, folder: Path) -> dict[str, str]:
    """The variables of a pod for that server; the key is that of the Secret."""
    return {
        "WANDB_BASE_URL": server.address,
        "WANDB_API_KEY": KEY,
        "WANDB_DIR": str(folder),
        "HOME": str(folder),
    }


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
