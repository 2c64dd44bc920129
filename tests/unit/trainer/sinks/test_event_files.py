"""Event files as TensorBoard's own reader reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.sinks import event_files
from finetune_trainer.sinks.entries import Metrics, Parameters, Settings, Start
from finetune_trainer.sinks.event_files import EventFiles
from finetune_trainer.storage import filesystems
from support.trackers import read_event_texts, read_events

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """Seconds since the epoch that pass when a test says so."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def new_writer(folder: Path | str, clock: Clock, attempt: int = 1) -> EventFiles:
    settings = Settings("TensorBoard", str(folder), "uid", "tune", f"tune.attempt-{attempt}")
    return EventFiles(settings, clock)


def loss(step: int, value: float = 1.0) -> Metrics:
    return Metrics(step, 1_800_000_000.0 + step, {"loss": value})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("resumed_step", "steps"),
    [
        # The steps after a checkpoint are repeated.
        (2, [(0, 10.0), (1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0)]),
        # Without a checkpoint, all steps are repeated, and the evaluation before the first one.
        (0, [(0, 20.0), (1, 21.0), (2, 22.0), (3, 23.0), (4, 24.0)]),
    ],
)
def test_a_resumed_attempt_replaces_the_events_that_it_repeats(
    tmp_path: Path, resumed_step: int, steps: list[tuple[int, float]]
) -> None:
    clock = Clock()
    first = new_writer(tmp_path, clock)
    first.add(Start(0))
    for step in range(4):
        first.add(loss(step, 10.0 + step))
    first.close()
    clock.now += 100
    second = new_writer(tmp_path, clock, attempt=2)
    second.add(Start(resumed_step))
    for step in range(resumed_step + 1 if resumed_step else 0, 5):
        second.add(loss(step, 20.0 + step))
    second.close()
    assert read_events(tmp_path) == {"loss": steps}


def test_an_evaluation_adds_its_metrics_and_replaces_none(tmp_path: Path) -> None:
    clock = Clock()
    training = new_writer(tmp_path, clock)
    training.add(Start(0))
    training.add(loss(3))
    training.close()
    clock.now += 1
    evaluation = new_writer(tmp_path, clock)
    evaluation.add(Metrics(4, clock.now, {"accuracy": 0.5}, is_result=True))
    evaluation.close()
    assert read_events(tmp_path) == {"loss": [(3, 1.0)], "accuracy": [(4, 0.5)]}


def test_parameters_are_a_table_of_text(tmp_path: Path) -> None:
    writer = new_writer(tmp_path, Clock())
    writer.add(Parameters({"learning_rate": 0.1, "target_modules": ["q_proj"]}))
    writer.add(Start(0))
    writer.close()
    assert read_event_texts(tmp_path) == {
        "parameters": '| parameter | value |\n|---|---|\n| learning_rate | 0.1 |\n| target_modules | ["q_proj"] |'
    }


def test_events_are_published_at_an_interval(tmp_path: Path) -> None:
    clock = Clock()
    writer = new_writer(tmp_path, clock)
    writer.add(Start(0))
    published = []
    for step in range(1, 8):
        writer.add(loss(step))
        writer.publish()
        published.append(len(read_events(tmp_path).get("loss", [])))
        clock.now += event_files.PUBLISH_SECONDS / 3
    assert published == [1, 1, 1, 4, 4, 4, 7]


def test_a_long_run_begins_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MAX_FILE_BYTES", 200)
    writer = new_writer(tmp_path, Clock())
    writer.add(Start(0))
    for step in range(1, 10):
        writer.add(loss(step))
    writer.close()
    assert len(names(tmp_path)) > 2
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 200 + 100
    assert read_events(tmp_path) == {"loss": [(step, 1.0) for step in range(1, 10)]}


def test_a_failure_half_way_through_a_file_leaves_no_broken_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(tmp_path, Clock())
    writer.add(Start(0))
    writer.add(loss(1))
    writer.publish()
    writer.add(loss(2))
    append = event_files._append

    def fill_volume(path: Path, content: bytes, written_bytes: int) -> None:
        append(path, content[: written_bytes + 10], written_bytes)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(event_files, "_append", fill_volume)
        with pytest.raises(OSError, match="No space"):
            writer.close()
    writer.add(loss(3))
    writer.close()
    assert read_events(tmp_path) == {"loss": [(1, 1.0), (2, 1.0), (3, 1.0)]}


def test_an_object_store_gets_whole_files() -> None:
    writer = new_writer("memory://logs/tune", Clock())
    writer.add(Start(0))
    sizes = []
    for step in (1, 2):
        writer.add(loss(step))
        writer.close()
        files, path = filesystems.open_filesystem("memory://logs/tune")
        (name,) = filesystems.list_files(files, path)
        sizes.append(files.size(name))
    assert 0 < sizes[0] < sizes[1]
