"""The steps that look at what an example says keep the same rows on any number of partitions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.prep import decontaminate
from unit.trainer.prep.recipes import Preparer, compiled, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK = "write a letter to a friend whom you have not seen for many years"
ENGLISH = "How do I reset the password of my account when I no longer have access to my mail?"
FRENCH = "Comment faire si je ne peux plus lire mes messages et que j'ai tout perdu ?"


def test_the_same_rows_on_1_4_and_16_partitions(
    spark: SparkSession, prepare: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in plans that Spark compiles, and where an executor's memory does not hold the runs of words of the evaluation set."""
    (prepare.folder / "tasks").mkdir()
    pq.write_table(pa.table({"task": [TASK]}), prepare.folder / "tasks" / "0.parquet")
    tasks = {"name": "tasks", "type": "Parquet", "path": str(prepare.folder / "tasks")}
    asked: dict[str, Any] = {
        "languages": ["en"],
        "redact": ["Email"],
        "decontaminate": {"sources": [tasks]},
    }
    rows = [
        {"question": f"{text} {number}@example.{end}", "answer": f"answer {number}"}
        for text in (ENGLISH, FRENCH, f"Please {TASK}")
        for end in ("com", "org")
        for number in range(20)
    ]
    one = prepare(rows, **asked)
    assert one.dropped == {"notNull": 0, "language": 40, "decontaminate": 40, "dedupe": 20}
    assert (one.redacted, one.rows.train) == ({"Email": 80}, 20)
    for partitions, most, running in ((4, 0, compiled(spark)), (16, 2_000_000, nullcontext())):
        monkeypatch.setattr(decontaminate, "_MOST_RUNS_HELD", most)
        with running:
            other = prepare(rows, partitions=partitions, **asked)
        assert (table_of(other), other.dropped, other.redacted) == (table_of(one), one.dropped, one.redacted)
        assert other.evaluation_sets == one.evaluation_sets
