"""The rank's side of the sinks: it waits for none of them, and says once what went wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from finetune_crds.recipe import JobRecipe
from finetune_trainer.sinks import feed
from finetune_trainer.sinks.entries import Settings
from finetune_trainer.sinks.feed import Sink, Sinks, build_settings

SETTINGS = Settings("WandB", "support", "uid", "tune", "attempt-1")
# Programs in the place of the process of a sink.
COPIES = "import sys; open(sys.argv[1], 'w').writelines(sys.stdin)"
NEVER_READS = "import time; time.sleep(600)"
GIVES_UP = "import sys; sys.stdin.readline()"
CRASHES = "import sys; sys.stdin.readline(); sys.exit(3)"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"


def new_sink(program: str, *arguments: str) -> Sink:
    return Sink(SETTINGS, [sys.executable, "-c", program, *arguments])


def test_a_sink_gets_settings_and_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5.0)
    copy = tmp_path / "copy"
    with Sinks([new_sink(COPIES, str(copy))]) as sinks:
        sinks.parameters({"folder": Path("/data")})
        sinks.start(0)
        sinks.metrics(1, {"loss": 2.5, "mfu": None, "step": 1, "max_steps": 9})
        sinks.metrics(2, {"max_steps": 9, "mfu": None})
    assert copy.read_text().splitlines() == [
        SETTINGS.encode(),
        '["Parameters", {"values": {"folder": "/data"}}]',
        '["Start", {"step": 0}]',
        '["Metrics", {"step": 1, "time": 5.0, "values": {"loss": 2.5}, "is_result": false}]',
        '["End", {"exit_code": 0}]',
    ]


def test_a_sink_learns_that_the_pod_has_failed(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with pytest.raises(ValueError, match="broken"), Sinks([new_sink(COPIES, str(copy))]):
        raise ValueError("broken")
    assert copy.read_text().endswith('["End", {"exit_code": 1}]\n')


def test_a_sink_that_does_not_read_costs_neither_time_nor_memory_and_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(feed, "_MAX_QUEUED_ENTRIES", 100)
    monkeypatch.setattr(feed, "_PATIENCE_SECONDS", 0.5)
    sink = new_sink(NEVER_READS)
    with Sinks([sink]) as sinks:
        started = time.perf_counter()
        for step in range(5000):
            sinks.metrics(step, {"loss": 1.0})
        seconds = time.perf_counter() - started
        assert len(sink._entries) <= 100
        closing = time.perf_counter()
    # A few microseconds for each entry; a busy machine takes longer.
    assert seconds < 5.0
    assert time.perf_counter() - closing < 5.0
    assert sink._process is not None
    assert sink._process.returncode == -9
    assert capsys.readouterr().out == "W&B did not take all metrics in time: the last ones are lost\n"


@pytest.mark.parametrize(
    ("program", "line"),
    [
        # A process that gives up says why by itself.
        (GIVES_UP, ""),
        (CRASHES, "W&B failed with code 3; the job goes on without it\n"),
        (IS_KILLED, "W&B was killed by signal 9; the job goes on without it\n"),
    ],
)
def test_a_sink_that_ends_early_is_reported_once(
    capsys: pytest.CaptureFixture[str], program: str, line: str
) -> None:
    sink = new_sink(program)
    with Sinks([sink]) as sinks:
        while sink._thread.is_alive():
            sinks.metrics(1, {"loss": 1.0})
        sinks.metrics(2, {"loss": 1.0})
        # What nobody takes is not kept.
        assert not sink._entries
    assert capsys.readouterr().out == line


def test_a_sink_that_cannot_be_started_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Sink(SETTINGS, ["/missing/python"])
    with Sinks([sink]) as sinks:
        sinks.metrics(1, {"loss": 1.0})
        sink._thread.join()
        sinks.metrics(2, {"loss": 1.0})
        # What nobody takes is not kept.
        assert not sink._entries
    assert capsys.readouterr().out.startswith("W&B cannot be started; the job goes on without it: ")


def test_a_recipe_has_settings_for_each_sink() -> None:
    recipe = JobRecipe.model_validate(
        {
            "job": {"name": "tune", "namespace": "team", "uid": "0123456789"},
            "tracking": {
                "runName": "first try",
                "systemMetrics": True,
                "sinks": [
                    {"type": "TensorBoard", "uri": "s3://logs/tensorboard/"},
                    {"type": "WandB", "project": "support", "entity": "ml", "secretRef": {"name": "wandb"}},
                ],
            },
        }
    )
    folder = "s3://logs/tensorboard/team-tune-01234567"
    shared = {"run_id": "0123456789", "run_name": "first try", "writer": "tune.attempt-2"}
    assert build_settings(recipe, "attempt-2") == [
        Settings("TensorBoard", folder, has_system_metrics=True, **shared),
        Settings("WandB", "support", entity="ml", has_system_metrics=True, **shared),
    ]
