"""The progress of a preparation, as the MLflow run learns it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from finetune_crds import contract
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.prep.spark.progress import (
    NEAR_DUPLICATES,
    READING,
    WRITING,
    Progress,
    SparkTasks,
    Tasks,
    show_in_run,
)
from support.waiting import wait_for

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession


class Told(Tracker):
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.texts: list[str] = []

    def tags(self, tags: dict[str, str]) -> None:  # type: ignore[override]
        assert list(tags) == [contract.TAG_PREPARATION]
        self.texts += tags.values()


class Counted:
    """Counts that a test sets."""

    def __init__(self) -> None:
        self.now = Tasks(0, 0)
        self.steps: list[str] = []

    def begin(self, step: str) -> None:
        self.steps.append(step)
        self.now = Tasks(0, 0)

    def count(self, step: str) -> Tasks:
        assert step == self.steps[-1]
        return self.now


def test_a_percent_only_grows_and_ends_with_the_next_step() -> None:
    tracker, counted = Told(), Counted()
    progress = Progress(partial(show_in_run, tracker), counted)
    progress.tell()
    progress.step(READING)
    for now in (Tasks(1, 4), Tasks(1, 4), Tasks(2, 10), Tasks(10, 10)):
        counted.now = now
        progress.tell()
    progress.step(WRITING)
    assert tracker.texts == ["reading 0%", "reading 25%", "reading 99%", "writing 0%"]


def test_a_percent_of_a_step_that_ended_meanwhile_is_not_told() -> None:
    class Slow(Counted):
        def count(self, step: str) -> Tasks:
            progress.step(WRITING)
            return Tasks(1, 2)

    tracker = Told()
    progress = Progress(partial(show_in_run, tracker), Slow())
    progress.step(READING)
    progress.tell()
    assert tracker.texts == ["reading 0%", "writing 0%"]


def test_without_counts_the_step_alone_is_told() -> None:
    tracker = Told()
    progress = Progress(partial(show_in_run, tracker), None)
    progress.step(READING)
    progress.tell()
    progress.step(NEAR_DUPLICATES)
    assert tracker.texts == ["reading", "near duplicates"]


def test_counts_that_fail_stop_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Counted):
        def count(self, step: str) -> Tasks:
            raise ConnectionError("Spark is gone")

    tracker = Told()
    progress = Progress(partial(show_in_run, tracker), Broken())
    progress.step(READING)
    assert tracker.texts == ["reading 0%"]
    with progress.running(seconds=0.01):
        output = wait_for("the sentence", lambda: capsys.readouterr().out)
    assert output == "stopped showing the progress of the preparation: Spark is gone\n"


def test_tasks_are_those_of_the_step(spark: SparkSession) -> None:
    # NB: other tests run the steps of a preparation in this session.
    counter = SparkTasks(spark.sparkContext)
    counter.begin("one")
    spark.sparkContext.parallelize(range(8), 4).count()
    counter.begin("another")
    spark.sparkContext.parallelize(range(8), 3).count()
    assert (counter.count("one"), counter.count("another")) == (Tasks(4, 4), Tasks(3, 3))
