"""Recipes for tests: the least that prepares something, and changes to it."""

from __future__ import annotations

from typing import Any

from finetune_crds.recipe import Recipe
from finetune_trainer.prep.progress import Progress

# For runs of seconds: few partitions, and a JVM that compiles quickly, not well.
PAIR = {"type": "PromptResponse", "prompt": "question", "response": "answer"}
QUICK = {"spark.sql.shuffle.partitions": "2"}
QUICK_JVM = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
Json = dict[str, Any]


def recipe(
    *,
    source: Json | None = None,
    columns: Json | None = PAIR,
    objective: Json | None = None,
    uid: str = "uid-1",
    base: str = "/model",
    **prepare: Any,
) -> Recipe:
    """A recipe over the columns `question` and `answer` of a Parquet folder; `prepare` is data.prepare.

    columns: None names none.
    """
    return Recipe.model_validate(
        {
            "job": {"name": "job", "namespace": "default", "uid": uid},
            "model": {"base": base},
            "data": {
                "source": source or {"type": "Parquet", "path": "/corpus"},
                "columns": columns,
                "prepare": {"output": "/out", **prepare},
            },
            "objective": objective or {},
        }
    )


def untold() -> Progress:
    """The progress of a preparation that has no run."""
    return Progress(lambda _step, _percent: None, None)
