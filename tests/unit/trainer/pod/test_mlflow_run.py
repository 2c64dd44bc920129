"""Tracking while MLflow comes and goes."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.train.runtime import system
from support.waiting import wait_for

if TYPE_CHECKING:
    from support.training import Mlflow


class Door:
    """Lets the tracker through to MLflow only when it is open."""

    def __init__(self, mlflow: Mlflow) -> None:
        self.mlflow = mlflow
        self.opened = False
        self.tried = threading.Event()

    def connect(self) -> Any:
        """A client, or what one gets from a server that is away."""
        if not self.opened:
            self.tried.set()
            raise ConnectionError("connection refused")
        return self.mlflow.client()


def history(mlflow: Mlflow, name: str) -> list[tuple[int, float]]:
    points = mlflow.client().get_metric_history(mlflow.run_id, name)
    return sorted((metric.step, metric.value) for metric in points)


def test_metrics_wait_for_mlflow_and_keep_their_times(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door(mlflow)
    tracker = Tracker(mlflow.run_id, connect=door.connect)
    began = time.time()
    for step in range(1500):
        tracker.metrics(step, {"loss": step / 2, "nothing": None})
    assert door.tried.wait(10)
    away_until = time.time()
    assert tracker.flush(0.01) is False
    door.opened = True
    tracker.close(30)
    assert history(mlflow, "loss") == [(step, step / 2) for step in range(1500)]
    times = [metric.timestamp for metric in mlflow.client().get_metric_history(mlflow.run_id, "loss")]
    assert began - 1 <= min(times) / 1000 <= max(times) / 1000 <= away_until + 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "MLflow is unreachable; continuing without it: connection refused",
        "MLflow is reachable again",
    ]


def test_an_mlflow_that_stays_away_holds_nobody_up(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(mlflow.run_id, connect=Door(mlflow).connect)
    tracker.metrics(1, {"loss": 1.0})
    began = time.monotonic()
    tracker.close(0.2)
    assert time.monotonic() - began < 5
    assert capsys.readouterr().out.splitlines() == [
        "MLflow is unreachable; continuing without it: connection refused",
        "MLflow was not reachable for 0 s: the last metrics are lost",
    ]


def test_the_next_attempt_does_not_conflict_on_parameters(mlflow: Mlflow) -> None:
    """Trap 16: the same parameter with another value is an error in MLflow."""
    for attempt, rate in (("1", 1e-3), ("2", 2e-3)):
        tracker = Tracker(mlflow.run_id, connect=mlflow.client)
        tracker.describe({"learning_rate": rate, f"only_{attempt}": attempt}, {"attempt": attempt})
        tracker.close(30)
    run = mlflow.client().get_run(mlflow.run_id).data
    assert run.params == {"learning_rate": "0.001", "only_1": "1", "only_2": "2"}
    assert run.tags["attempt"] == "2"


def test_what_mlflow_refuses_is_left_out_and_the_rest_follows(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(mlflow.run_id, connect=mlflow.client)
    tracker.describe({"bad/../name:*": "x"}, {})
    tracker.metrics(3, {"loss": 0.5})
    tracker.close(30)
    assert history(mlflow, "loss") == [(3, 0.5)]
    assert "MLflow rejected an entry; dropping it: " in capsys.readouterr().out


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_ends_well_waits_longer_for_mlflow_than_one_that_fails(
    mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    monkeypatch.setattr("finetune_trainer.pod.mlflow_run._CLOSE_SECONDS", 0.05)
    door = Door(mlflow)
    opening = threading.Timer(1, setattr, (door, "opened", True))
    with suppress(ZeroDivisionError), Tracker(mlflow.run_id, connect=door.connect) as tracker:
        tracker.metrics(1, {"loss": 2.0})
        assert door.tried.wait(10)
        opening.start()
        if fails:
            raise ZeroDivisionError
    lost = not door.opened
    opening.cancel()
    assert (lost, history(mlflow, "loss")) == (fails, [] if fails else [(1, 2.0)])


def test_without_a_run_nothing_is_tracked() -> None:
    tracker = Tracker(None)
    tracker.metrics(1, {"loss": 1.0})
    assert tracker.flush(0)
    tracker.close()


def test_what_a_rank_takes_of_its_machine_is_logged_until_it_ends(mlflow: Mlflow) -> None:
    tracker = Tracker(mlflow.run_id, connect=mlflow.client)
    with system.log_system_metrics(tracker, 3, torch.device("cpu"), interval_seconds=0.01):
        wait_for("3 samples", lambda: len(history(mlflow, "system/rank-3/memory_bytes")) >= 3)
    tracker.close(30)
    memory = history(mlflow, "system/rank-3/memory_bytes")
    assert [step for step, _ in memory] == list(range(1, len(memory) + 1))
    assert all(size > 2**20 for _, size in memory)
    assert max(percent for _, percent in history(mlflow, "system/rank-3/cpu_percent")) > 0


def test_samples_wait_for_mlflow_and_hold_nobody_up(
    mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    door = Door(mlflow)
    tracker = Tracker(mlflow.run_id, connect=door.connect, quiet=True)
    began = time.monotonic()
    with system.log_system_metrics(tracker, 1, torch.device("cpu"), interval_seconds=60):
        pass
    assert time.monotonic() - began < 5
    assert door.tried.wait(10)
    door.opened = True
    tracker.close(30)
    assert len(history(mlflow, "system/rank-1/cpu_percent")) == 1
    assert capsys.readouterr().out == ""


def test_a_table_is_a_dataset_by_its_path_or_its_name(mlflow: Mlflow) -> None:
    tracker = Tracker(mlflow.run_id, connect=mlflow.client)
    for address in ("s3://lake/raw", "main.llm.raw"):
        tracker.dataset(address, name=address, digest="version-3", version=3, use="source")
    tracker.close(30)
    used = mlflow.client().get_run(mlflow.run_id).inputs.dataset_inputs
    assert {tag.value for each in used for tag in each.tags} == {"source"}
    sources = {each.dataset.name: json.loads(each.dataset.source) for each in used}
    assert {
        name: (source.get("path"), source.get("delta_table_name")) for name, source in sources.items()
    } == {
        "s3://lake/raw": ("s3://lake/raw", None),
        "main.llm.raw": (None, "main.llm.raw"),
    }
    assert {source["delta_table_version"] for source in sources.values()} == {3}


def test_files_are_named_as_the_dataset_too(mlflow: Mlflow) -> None:
    tracker = Tracker(mlflow.run_id, connect=mlflow.client)
    azure = "abfss://lake@account.dfs.core.windows.net/train"
    for uri in ("/data/train.jsonl", "s3://bucket/train", "gs://bucket/train", azure):
        tracker.dataset(uri, name=uri, digest="72-examples-936-tokens")
    tracker.close(30)
    used = [each.dataset for each in mlflow.client().get_run(mlflow.run_id).inputs.dataset_inputs]
    assert sorted(
        (each.name, each.digest, each.source_type, json.loads(each.source)["uri"]) for each in used
    ) == [
        ("/data/train.jsonl", "72-examples-936-tokens", "local", "/data/train.jsonl"),
        (azure, "72-examples-936-tokens", "abfss", azure),
        ("gs://bucket/train", "72-examples-936-tokens", "gs", "gs://bucket/train"),
        ("s3://bucket/train", "72-examples-936-tokens", "s3", "s3://bucket/train"),
    ]


SIGNED = "X-Amz-Credential=tests%2F1&X-Amz-Signature=c0ffee"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            f"403 Client Error: Forbidden for url: http://s3:9000/lake/a?{SIGNED}\nmore",
            "403 Client Error: Forbidden for url: http://s3:9000/lake/a",
        ),
        (
            f"Max retries exceeded with url: /lake/a?{SIGNED} (Caused by 'no route')",
            "Max retries exceeded with url: /lake/a (Caused by 'no route')",
        ),
        ("is it there? no", "is it there? no"),
    ],
)
def test_addresses_are_named_without_what_they_are_signed_with(said: str, expected: str) -> None:
    assert mlflow_run.first_line(ValueError(said)) == expected


def test_the_log_of_an_upload_names_no_signature(mlflow: Mlflow, caplog: pytest.LogCaptureFixture) -> None:
    mlflow_run.create_client(mlflow.uri)
    logger = logging.getLogger("mlflow.store.artifact.http_artifact_repo")
    logger.addHandler(caplog.handler)
    logger.warning("no answer of %s", f"/lake/a?{SIGNED}")
    logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"no answer of /lake/a"}
