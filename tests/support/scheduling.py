"""A pytest plugin that hands test files to the workers: long ones first, and those that run Spark to few workers.

pytest-xdist's own order is by the number of tests in a file, which says nothing about its duration: files that run Spark
have few tests, so they came last and one worker ran them while the others had ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LONGEST = (
    "tests/unit/trainer/test_plan.py",
    "tests/unit/trainer/model/memory/test_estimate.py",
    "tests/unit/trainer/evaluate/",
    "tests/unit/operator/finetunejob/pods/test_installer.py",
    "tests/unit/operator/finetunejob/test_finetunejob_faults.py",
    "tests/unit/operator/finetunejob/decide/test_random_jobs.py",
    "tests/unit/operator/git/test_repository.py",
    "tests/unit/operator/modelpromotion/",
    # The longest that run Spark, some in JVMs of their own: short ones at the end let both workers end together.
    "tests/unit/trainer/prep/test_command.py",
    "tests/unit/trainer/prep/spark/test_spark_application.py",
    "tests/unit/trainer/prep/test_databricks.py",
    "tests/unit/trainer/prep/expressions/test_content.py",
    "tests/unit/trainer/prep/steps/",
    "tests/unit/trainer/prep/spark/test_metastore.py",
    "tests/unit/trainer/prep/test_partitions.py",
    "tests/unit/trainer/prep/test_lost_executor.py",
    "tests/unit/trainer/prep/test_output.py",
    "tests/unit/trainer/prep/test_pipeline.py",
    # These import torch: they start on the worker that does not run Spark.
    "tests/unit/trainer/",
    "tests/trainer/test_end_to_end.py",
    "tests/trainer/test_sharded.py",
    "tests/trainer/test_methods.py",
    "tests/trainer/test_parity.py",
    "tests/trainer/test_ends.py",
    "tests/trainer/test_reading.py",
    "tests/integration/test_databricks_preparation.py",
    "tests/integration/test_promotion.py",
    "tests/integration/test_lifecycle.py",
    "tests/integration/installed/",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_registry.py",
)
"""Files, and folders of files, in the order in which they begin; the others follow."""

TOGETHER = ("tests/integration/installed/",)
"""Folders whose files one worker runs, one after the other."""

SPARK = "tests/unit/trainer/prep/"
"""Files that share a session of Spark, which takes a worker 10 s to start."""


class Scheduling(LoadFileScheduling):
    """Gives a worker a file at a time, or a folder of TOGETHER; files that run Spark go to one worker while others are left."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._with_spark: set[WorkerController] = set()

    def _split_scope(self, nodeid: str) -> str:
        folder = next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)
        return folder or super()._split_scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        prefers_spark = node in self._with_spark or not self._with_spark
        file = choose(list(self.workqueue), prefers_spark=prefers_spark)
        if file.startswith(SPARK):
            self._with_spark.add(node)
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


def choose(files: Sequence[str], *, prefers_spark: bool) -> str:
    """Return the first file of the kind that a worker prefers, or else the first of all."""
    return next((file for file in files if file.startswith(SPARK) == prefers_spark), files[0])


def pytest_configure() -> None:
    """Give each worker one thread: threads of OpenMP that wait for a core that another worker has burn CPU time."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of LONGEST first, in its order; others keep theirs."""
    items.sort(key=_rank)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """A Scheduling that keeps the order."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, scope in enumerate(LONGEST) if item.nodeid.startswith(scope)), len(LONGEST))
