"""A small corpus that each step drops rows of, and what prepares it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from unit.trainer.prep.recipes import WITHOUT_SAMPLES, prepare_quickly, recipe

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_trainer.prep.report.report import Facts

ROWS = [
    {"question": f"What is in table {number}?", "answer": f"The answer is {number}.", "quality": number / 100}
    for number in range(100)
]
# Besides: a duplicate but for case, a blank answer, an answer that is long, one without a score.
DIRTY = [
    ROWS[60] | {"question": "WHAT IS  in table 60?"},
    ROWS[61] | {"answer": " "},
    ROWS[62] | {"answer": "the answer is in the table, " * 30},
    ROWS[63] | {"quality": None},
]
STEPS: dict[str, Any] = {
    "minQuality": 0.2,
    "promptTemplate": "Q: {question}\nA:",
    "responseTemplate": " {answer}",
    "maxTokens": 100,
    "limit": 70,
    "splitRatios": {"train": 0.8, "validation": 0.1, "test": 0.1},
}
DROPPED = {"notNull": 1, "minQuality": 21, "dedupe": 1, "maxTokens": 1, "limit": 10}


def write_corpus(folder: Path) -> None:
    """Write the rows as Parquet to `parquet`, as JSON lines to `lines.jsonl`, and as a Delta table to `delta`.

    `pairs.jsonl` has a preference whose chosen answer is a list of texts, and `empty` nothing. Version 0 of the table has the rows,
    version 1 none.
    """
    table = pa.Table.from_pylist(ROWS + DIRTY)
    (folder / "empty").mkdir()
    (folder / "parquet").mkdir()
    pq.write_table(table, folder / "parquet" / "part-0.parquet")
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS + DIRTY))
    pair = {"prompt": "why", "chosen": ["so"], "rejected": "no"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    write_deltalake(folder / "delta", table)
    write_deltalake(folder / "delta", table.slice(0, 0), mode="overwrite")


class Asker:
    """Prepares the corpus with changes to a good recipe.

    run: runs the preparation.
    """

    def __init__(self, spark: SparkSession, corpus: Path, tokenizer: Path, output: Path) -> None:
        self.spark, self.corpus, self.tokenizer, self.output = spark, corpus, tokenizer, output
        self.shown: list[Facts] = []
        self.run = prepare_quickly

    def __call__(self, **changes: Any) -> PrepResult:
        changes = {
            "source": {"type": "Parquet", "path": str(self.corpus / "parquet")},
            "base": str(self.tokenizer),
            "output": str(self.output),
            **WITHOUT_SAMPLES,
        } | changes
        return self.run(self.spark, recipe(**changes), self.shown.append)


def counted(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Rows and tokens of each split."""
    counts = {
        "rows": {"train": 0, "validation": 0, "test": 0},
        "tokens": {"train": 0, "validation": 0, "test": 0},
    }
    for row in rows:
        counts["rows"][row["split"]] += 1
        counts["tokens"][row["split"]] += row["tokens"]
    return counts
