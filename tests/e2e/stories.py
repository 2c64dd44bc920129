"""Stories run beside the tests, two at a time: most of a story is waiting for pods.

A module of tests whose story needs nobody to look at it has a function `run_story`; its tests check what it returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from types import ModuleType
from typing import Any

from demo.install import Installation
from demo.kubectl import Json
from e2e.jobs import STEPS, Jobs, Run, quickstart
from support.canary import VARIABLES

# NB: each job starts up to four ranks, and the machine has two cores.
_MAX_STORIES = 2
_LIMIT_SECONDS = 2400


@dataclass
class Stage:
    """The cluster with the product installed, for stories and tests."""

    jobs: Jobs
    _lock: Lock = field(default_factory=Lock, repr=False)
    _quickstart: Future[Run] = field(default_factory=Future, repr=False)

    @property
    def installation(self) -> Installation:
        """The product in the cluster."""
        return self.jobs.installation

    def quickstart(self) -> Run:
        """Run the quickstart, the first time; others wait for it, and train on its splits."""
        if self._lock.acquire(blocking=False):
            try:
                self._quickstart.set_result(self._run_quickstart())
            except BaseException as error:
                self._quickstart.set_exception(error)
                raise
        return self._quickstart.result()

    def _run_quickstart(self) -> Run:
        statuses: list[Json] = []
        manifest = quickstart(maxSteps=STEPS, evalEverySteps=30, logEverySteps=2)
        manifest["spec"]["pods"]["all"]["env"] = VARIABLES
        name = self.jobs.apply(manifest)
        job = self.jobs.follow(name, on_read=lambda job: statuses.append(job.get("status", {})))
        return Run(job, statuses)


class Stories:
    """The stories of some modules, which begin in that order."""

    def __init__(self, stage: Stage, modules: Iterable[ModuleType]) -> None:
        self.stage = stage
        self._pool = ThreadPoolExecutor(_MAX_STORIES, thread_name_prefix="story")
        self._results = {module: self._pool.submit(self._run, module) for module in modules}

    def result(self, module: ModuleType) -> Any:
        """Wait for a story's end; return what it returned, or raise what it raised, at last TimeoutError."""
        return self._results[module].result(_LIMIT_SECONDS)

    def cancel(self) -> None:
        """Start no further story, and end those that run at their next look at the cluster."""
        self.stage.jobs.cancelled.set()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, module: ModuleType) -> Any:
        name = module.__name__.rpartition(".")[2].removeprefix("test_")
        began, end = time.monotonic(), "failed"
        try:
            result = module.run_story(self.stage)
            end = "ended"
        finally:
            seconds = time.monotonic() - began
            self.stage.installation.terminal.detail(f"{name}: the story {end} after {seconds:.0f} s")
        return result
