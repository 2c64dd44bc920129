"""All steps together keep the same rows, in the same splits, on any number of partitions."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_trainer.prep.steps import decontaminate
from support.quick_session import compiled
from unit.trainer.prep.recipes import Preparer, prepared, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from unit.trainer.prep.recipes import Json

TASK = "write a letter to a friend whom you have not seen for many years"
FRENCH = "Comment faire si je ne peux plus lire mes messages et que j'ai tout perdu ?"
VOCABULARY = (
    "account answer before bring building carry change clear copy country doctor early every figure "
    "follow ground happen heavy history island kitchen language letter listen machine measure minute "
    "morning mountain nothing notice number office open paper pattern people picture plant problem "
    "question reach reason river school second sentence simple station street surface table travel "
    "village water winter"
)


def corpus() -> list[Json]:
    """Rows of which each step drops some. Of the texts, two each have one `id`, which is the key of the split; `topic` is the stratum."""
    chance = random.Random(7)  # noqa: S311 - the seed makes the rows the same each time
    texts = [" ".join(chance.choices(VOCABULARY.split(), k=20)) for _ in range(40)]

    def row(text: str, number: int, end: str = "com", topic: int | None = None) -> Json:
        return {
            "question": f"{text} {number}@example.{end}",
            "answer": f"answer {number}",
            "id": f"document {number // 2}",
            "topic": f"topic {number % 3 if topic is None else topic}",
        }

    return [
        *(row(text, number) for number, text in enumerate(texts)),
        # The same behind redaction, and the same of another stratum.
        *(row(text, number, end="org") for number, text in enumerate(texts[:10])),
        *(row(text, number, topic=9) for number, text in enumerate(texts[:5])),
        # One word of 20 differs.
        *(row(f"{text.rsplit(' ', 1)[0]} other", number) for number, text in enumerate(texts[:10])),
        *(row(FRENCH, number) for number in range(40, 50)),
        *(row(f"Please {TASK}", number) for number in range(50, 55)),
        *(row(" ".join(chance.choices(VOCABULARY.split(), k=200)), number) for number in range(60, 65)),
    ]


def test_the_same_rows_on_1_and_8_partitions(
    spark: SparkSession, prepare: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 8 partitions have the rows in another order.

    On one partition, Spark compiles the plans, counts the rows and writes them, and an executor's memory does not hold the runs of words of
    the evaluation set.
    """
    (prepare.folder / "tasks").mkdir()
    pq.write_table(pa.table({"task": [TASK]}), prepare.folder / "tasks" / "0.parquet")
    tasks = {"name": "tasks", "type": "Parquet", "path": str(prepare.folder / "tasks")}
    ratios = {"train": 0.6, "validation": 0.2, "test": 0.2, "key": "id", "stratifyBy": "topic"}
    changes: dict[str, Any] = {
        "languages": ["en"],
        "redact": ["Email"],
        "decontaminate": {"sources": [tasks]},
        "dedupe": {"near": {}},
        "maxTokens": 400,
        "limit": 30,
        "splitRatios": ratios,
    }
    rows = corpus()
    with compiled(spark), monkeypatch.context() as patch:
        patch.setattr(decontaminate, "_MAX_RUNS_IN_MEMORY", 0)
        patch.setattr(prepare, "run", prepared)
        on_one_partition = prepare(rows, **changes)
    table = table_of(on_one_partition)
    assert on_one_partition.dropped == {
        "notNull": 0,
        "language": 10,
        "decontaminate": 5,
        "dedupe": 15,
        "near": 10,
        "maxTokens": 5,
        "limit": 10,
    }
    assert on_one_partition.redacted == {"Email": 75}
    assert Counter(row["split"] for row in table) == Counter(on_one_partition.rows.to_json())
    splits: dict[int, list[str]] = {}
    for row in table:
        splits.setdefault(int(row["response"].split()[1]) // 2, []).append(row["split"])
    assert {len(set(names)) for names in splits.values()} == {1}
    assert (len(table), {len(names) for names in splits.values()}) == (30, {1, 2})
    on_8_partitions = prepare(rows[::-1], partitions=8, **changes)
    assert (table_of(on_8_partitions), on_8_partitions.dropped, on_8_partitions.redacted) == (
        table,
        on_one_partition.dropped,
        on_one_partition.redacted,
    )
    assert on_8_partitions.evaluation_sets == on_one_partition.evaluation_sets
    assert [shown.samples for shown in prepare.shown] == [{}] * 2
