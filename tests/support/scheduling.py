"""A pytest plugin that hands test files to the workers: long ones first, and files that share a JVM to one worker.

pytest-xdist's own order is by the number of tests in a file, which says nothing about its duration: files that run Spark
have few tests, so they came last and one worker ran them while the others had ended.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

LONGEST = (
    "tests/unit/trainer/prep/",
    "tests/unit/operator/modelpromotion/test_random_canaries.py",
    "tests/unit/operator/finetunejob/decide/test_random_jobs.py",
    "tests/unit/demo/",
    "tests/trainer/test_end_to_end.py",
    "tests/trainer/test_sharded.py",
    "tests/trainer/test_methods.py",
    "tests/trainer/test_parity.py",
    "tests/trainer/test_ends.py",
    "tests/trainer/test_reading.py",
    "tests/integration/test_databricks_preparation.py",
    "tests/integration/test_promotion.py",
    "tests/integration/test_lifecycle.py",
    "tests/integration/test_bad_input.py",
    "tests/integration/test_installation.py",
    "tests/integration/test_registry.py",
)
"""Files, and folders whose files one worker runs, in the order in which they begin."""

LAST = (
    "tests/unit/trainer/prep/test_prep_submitted.py",
    "tests/unit/trainer/prep/test_prep_errors.py",
    "tests/unit/trainer/prep/test_prep_partitions.py",
    "tests/unit/trainer/prep/test_prep_gs.py",
)
"""Files of folders in LONGEST that the first worker without work runs, also where it has to start a JVM of its own (10 s)."""


class Scheduling(LoadFileScheduling):
    """Gives a worker a file at a time, or all files of a folder in LONGEST."""

    def _split_scope(self, nodeid: str) -> str:
        scope = next((scope for scope in LONGEST if nodeid.startswith(scope)), None)
        return super()._split_scope(nodeid) if scope is None or nodeid.startswith(LAST) else scope


def pytest_configure() -> None:
    """Give each worker one thread: threads of OpenMP that wait for a core that another worker has burn CPU time."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of LONGEST first, in its order, and those of LAST last; others keep theirs."""
    items.sort(key=_rank)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """A Scheduling that keeps the order."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _rank(item: pytest.Item) -> int:
    if item.nodeid.startswith(LAST):
        return len(LONGEST) + 1
    return next((rank for rank, scope in enumerate(LONGEST) if item.nodeid.startswith(scope)), len(LONGEST))
