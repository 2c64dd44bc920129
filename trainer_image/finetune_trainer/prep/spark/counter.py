"""Counts the rows of a frame, at its place in a Spark plan, while an action runs the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import Observation
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Counter:
    """Counts the rows of a frame, in an action that reads the frame for another purpose.

    NB: Spark adds up what each task observed. When an executor is lost, the tasks whose results it kept run again, and their rows
    count twice. `read` can then count the rows again, each once, in a separate action.
    """

    def __init__(self, name: str) -> None:
        self._observation = Observation(name)
        self._frame: DataFrame | None = None
        self._counts: list[Column] = []

    def watch(self, frame: DataFrame, **counts: Column) -> DataFrame:
        """Return the frame; when it is read, its rows are counted as `all`, and each aggregate under its name."""
        self._frame = frame
        self._counts = [
            sf.count(sf.lit(1)).alias("all"),
            *(count.alias(name) for name, count in counts.items()),
        ]
        return frame.observe(self._observation, *self._counts)

    def read(self, *, again: bool) -> dict[str, Any]:
        """Return the counts, by name.

        Args:
            again: count in a separate action. Otherwise an action on the observed frame must have ended.
        """
        if not again or self._frame is None:
            return dict(self._observation.get)
        row = self._frame.agg(*self._counts).first()
        assert row is not None  # noqa: S101 - an aggregate without groups has one row
        return dict(row.asDict())
