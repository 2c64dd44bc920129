"""The progress of a preparation: which step runs and its percent, from Spark's own counts of tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from finetune_crds import contract

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark import SparkContext

    from finetune_trainer.pod.mlflow_run import Tracker

# The steps, as people see them.
READING, EVALUATION_SETS, NEAR_DUPLICATES = "reading", "evaluation sets", "near duplicates"
TOKENS, WRITING = "tokens", "writing"
_INTERVAL_SECONDS = 2.0


class Tasks(NamedTuple):
    """The number of completed tasks of a step, and of all its tasks that Spark has created so far."""

    done: int
    total: int


class TaskCounter(Protocol):
    """Counts the tasks of a step."""

    def begin(self, step: str) -> None:
        """Count the tasks that this thread starts from now on as tasks of a step."""

    def count(self, step: str) -> Tasks:
        """Return the tasks of a step, from any thread."""


class SparkTasks:
    """Counts Spark's tasks; a step is a job group."""

    def __init__(self, spark: SparkContext) -> None:
        self._spark = spark

    def begin(self, step: str) -> None:
        """Count the tasks that this thread starts from now on as tasks of a step."""
        self._spark.setJobGroup(step, step)

    def count(self, step: str) -> Tasks:
        """Return the tasks of a step, from any thread."""
        tracker = self._spark.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(step)]
        stages = {stage for job in jobs if job for stage in job.stageIds}
        stage_infos = [info for stage in stages if (info := tracker.getStageInfo(stage))]
        return Tasks(
            sum(info.numCompletedTasks for info in stage_infos), sum(info.numTasks for info in stage_infos)
        )


Show = Callable[[str, int | None], None]
"""Shows a step and its percent; None if the percent is unknown."""


def describe(step: str, percent: int | None) -> str:
    """Return a step and its percent as text."""
    return step if percent is None else f"{step} {percent}%"


def show_in_run(tracker: Tracker, step: str, percent: int | None) -> None:
    """Show a step and its percent in a tag of the MLflow run."""
    tracker.tags({contract.TAG_PREPARATION: describe(step, percent)})


class Progress:
    """Shows which step of a preparation runs, and its percent.

    Args:
        counter: counts the tasks for the percent; None: steps are shown without a percent.
    """

    def __init__(self, show: Show, counter: TaskCounter | None) -> None:
        self._show = show
        self._counter = counter
        self._step = ""
        self._percent = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def step(self, name: str) -> None:
        """Begin a step, in the thread that runs it."""
        if self._counter:
            self._counter.begin(name)
        with self._lock:
            self._step, self._percent = name, 0
            self._show(name, 0 if self._counter else None)

    def tell(self) -> None:
        """Show the percent of the step, if it has grown.

        NB: Spark creates the later stages of a step only after the earlier stages, which lowers the percent. So a lower percent is not
        shown, and no step reaches more than 99%.
        """
        step = self._step
        if self._counter is None or not step:
            return
        tasks = self._counter.count(step)
        percent = min(100 * tasks.done // tasks.total, 99) if tasks.total else 0
        with self._lock:
            # The next step may have begun in the meantime.
            if step == self._step and percent > self._percent:
                self._percent = percent
                self._show(step, percent)

    @contextmanager
    def running(self, seconds: float = _INTERVAL_SECONDS) -> Iterator[None]:
        """Show the progress every few seconds while a block runs."""
        thread = threading.Thread(target=self._work, args=(seconds,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _work(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            try:
                self.tell()
            except Exception as error:  # noqa: BLE001 - progress never stops a preparation
                print(f"stopped showing the progress of the preparation: {error}", flush=True)
                return
