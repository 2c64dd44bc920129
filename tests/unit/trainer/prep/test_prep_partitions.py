"""The steps that look at what an example says keep the same rows on any number of partitions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.prep import decontaminate
from unit.trainer.prep.recipes import Preparer, table_of

TASK = "write a letter to a friend whom you have not seen for many years"
ENGLISH = "How do I reset the password of my account when I no longer have access to my mail?"
FRENCH = "Comment faire si je ne peux plus lire mes messages et que j'ai tout perdu ?"


def test_the_same_rows_on_1_4_and_16_partitions(prepare: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the runs of words of the evaluation set are too many for the memory of each executor."""
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
    for partitions, most in ((4, 0), (16, 2_000_000)):
        monkeypatch.setattr(decontaminate, "_MOST_RUNS_HELD", most)
        other = prepare(rows, partitions=partitions, **asked)
        assert (table_of(other), other.dropped, other.redacted) == (table_of(one), one.dropped, one.redacted)
        assert other.evaluation_sets == one.evaluation_sets
