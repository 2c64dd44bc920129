"""An offline run of W&B, read from its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import wandb
from wandb.errors import AuthenticationError, CommError, UsageError

from finetune_trainer.sinks import wandb_run
from finetune_trainer.sinks.entries import End, Metrics, Parameters, Settings, Start
from finetune_trainer.sinks.wandb_run import WandbRun
from support.trackers import read_wandb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SETTINGS = Settings("WandB", "support", "0123-4567", "first try", "attempt-1", entity="team")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The client writes to the folder of the test alone, and its process ends with the test."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_SILENT", "WANDB_ERROR_REPORTING", "WANDB_INIT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()


def test_a_run_has_parameters_history_and_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = WandbRun(SETTINGS)
    for entry in (
        Parameters({"learning_rate": 0.1}),
        Start(0),
        Metrics(0, 100.0, {"eval_loss": 3.0}),
        Metrics(2, 102.0, {"loss": 2.0}),
        Metrics(2, 103.0, {"eval_loss": 2.5}),
        Metrics(3, 104.0, {"accuracy": 0.5}, is_result=True),
        # A step that a resumed attempt repeats.
        Metrics(1, 105.0, {"loss": 2.0}),
    ):
        writer.add(entry)
        writer.publish()
    writer.add(End(0))
    writer.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, summary, record = read_wandb(path)
    assert [
        (step, {name: value for name, value in row.items() if name not in ("_runtime", "_step")})
        for step, row in history
    ] == [
        (0, {"eval_loss": 3.0, "_timestamp": 100.0}),
        (2, {"loss": 2.0, "eval_loss": 2.5, "_timestamp": 103.0}),
    ]
    assert {name: summary[name] for name in ("loss", "eval_loss", "accuracy")} == {
        "loss": 2.0,
        "eval_loss": 2.5,
        "accuracy": 0.5,
    }
    run = record.run
    assert (run.run_id, run.entity, run.project, run.display_name) == (
        "0123-4567",
        "team",
        "support",
        "first try",
    )


def test_the_file_of_a_run_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_run, "MAX_LOGGED_BYTES", 2 * 64)
    writer = WandbRun(SETTINGS)
    for step in range(1, 6):
        writer.add(Metrics(step, 1.0, {"loss": 1.0}))
    writer.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, _summary, _record = read_wandb(path)
    assert [step for step, _ in history] == [1, 2]
    assert capsys.readouterr().out == (
        "W&B's project support gets no more metrics, after 0 MiB from this pod: raise training.logEverySteps\n"
    )


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (AuthenticationError("bad key"), True),
        (UsageError("no key"), True),
        (CommError("Failed to get resume status for run r: returned error 401: {}"), True),
        (CommError("Failed to get resume status for run r: returned error 403: {}"), True),
        (CommError("permission denied"), True),
        (CommError("Failed to get resume status for run r: returned error 503: {}"), False),
        (CommError("timeout"), False),
    ],
)
def test_only_errors_that_a_retry_cannot_correct_are_final(error: Exception, *, is_final: bool) -> None:
    assert WandbRun(SETTINGS).is_final(error) == is_final
