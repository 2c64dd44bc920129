"""Stories run beside the tests, two at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier, Event, Thread
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from e2e.jobs import Run
from e2e.stories import Stage, Stories


def module(name: str, run_story: Callable[[Stage], Any]) -> ModuleType:
    """A module of tests with a story."""
    created = ModuleType(f"e2e.test_{name}")
    created.run_story = run_story  # type: ignore[attr-defined]
    return created


@contextmanager
def running(*modules: ModuleType) -> Iterator[Stories]:
    """Run the stories of some modules."""
    stories = Stories(Stage(MagicMock()), modules)
    try:
        yield stories
    finally:
        stories.cancel()


def test_two_stories_run_at_once_and_the_third_after_one_of_them() -> None:
    meeting, end, third_began = Barrier(2), Event(), Event()

    def meet(_: Stage) -> str:
        meeting.wait(10)
        end.wait(10)
        return "met"

    def begin(_: Stage) -> str:
        third_began.set()
        return "third"

    modules = [module("first", meet), module("second", meet), module("third", begin)]
    with running(*modules) as stories:
        assert not third_began.wait(0.1)
        end.set()
        assert [stories.result(each) for each in modules] == ["met", "met", "third"]


def test_the_error_of_a_story_is_that_of_its_tests_alone() -> None:
    def fail(_: Stage) -> None:
        raise ValueError("no pods")

    modules = [module("bad", fail), module("good", lambda _: "good")]
    with running(*modules) as stories:
        with pytest.raises(ValueError, match="no pods"):
            stories.result(modules[0])
        assert stories.result(modules[1]) == "good"


@pytest.mark.parametrize("error", [None, RuntimeError("no base model")], ids=["succeeds", "fails"])
def test_the_quickstart_runs_once_for_all(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Run] = []

    def run(_: Stage) -> Run:
        runs.append(Run({"status": {}}))
        if error:
            raise error
        return runs[0]

    monkeypatch.setattr(Stage, "_run_quickstart", run)
    stage = Stage(MagicMock())
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(stage.quickstart())
        except RuntimeError as failure:
            results.append(failure)

    threads = [Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(runs) == 1
    assert results == [error or runs[0]] * 3
