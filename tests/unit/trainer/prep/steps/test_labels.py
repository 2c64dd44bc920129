"""Labels of unpaired preferences, from a source to the table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.data import Columns
from finetune_trainer.prep.expressions import labels
from unit.trainer.prep.recipes import Preparer, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

Json = dict[str, Any]
KTO: Json = {"type": "KTO"}
LABELS: dict[str, list[tuple[Any, bool | None]]] = {
    "boolean": [(True, True), (False, False), (None, None)],
    "tinyint": [(1, True), (0, False), (2, None), (None, None)],
    "string": [
        *(("true", True), (" True ", True), ("1", True)),
        *(("FALSE", False), ("0", False)),
        *(("good", None), ("", None), (None, None)),
    ],
}


@pytest.mark.parametrize(("kind", "values"), LABELS.items(), ids=LABELS)
def test_labels_are_booleans_or_nothing(
    spark: SparkSession, kind: str, values: list[tuple[Any, bool | None]]
) -> None:
    frame = spark.createDataFrame([(value,) for value, _ in values], f"`thumb up` {kind}")
    booleans = frame.select(labels.as_boolean(frame, "thumb up")).collect()
    assert [row[0] for row in booleans] == [label for _, label in values]


def judged(number: int, **changes: Any) -> Json:
    """An answer that shares no words with others, good if its number is odd."""
    words = " ".join(f"word{number}x{at}" for at in range(30))
    return {"ask": f"Where is table {number}?", "said": words, "thumb": number % 2, **changes}


def test_an_answer_that_is_judged_both_ways_is_two_examples(prepare: Preparer, tmp_path: Path) -> None:
    rows = [judged(number) for number in range(16)]
    both_ways = [row | {"thumb": 1 - row["thumb"]} for row in rows[:8]]
    dirty = [
        judged(8, ask="WHERE IS  table 8?"),  # the same but for case and white space
        judged(9, thumb=2),
        judged(10, thumb=None),
        judged(11, said=" "),
        judged(12, said=f"{judged(12)['said']} again"),  # nearly the same
        judged(13, said=f"{judged(13)['said']} again", thumb=0),  # nearly the same, but a bad one
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + both_ways + dirty))
    result = prepare(
        [judged(0)],
        source={"type": "JSONLines", "path": str(tmp_path / "rows.jsonl")},
        columns={"type": "Unpaired", "prompt": "ask", "completion": "said", "label": "thumb"},
        objective=KTO,
        promptTemplate="Q: {ask}",
        dedupe={"near": {}},
        splitRatios={"train": 0.5, "validation": 0.5, "test": 0},
    )
    table_rows = table_of(result)
    assert result.dropped == {"notNull": 3, "dedupe": 1, "near": 1}
    assert list(table_rows[0]) == [
        *("id", "prompt", "completion", "label", "input_ids", "loss_mask", "tokens", "split")
    ]
    good = [(f"Q: {row['ask']}", row["said"]) for row in [*rows, *both_ways] if row["thumb"]]
    assert {(row["prompt"], row["completion"]) for row in table_rows if row["label"]} >= set(good)
    splits: dict[str, set[str]] = {}
    answers: dict[str, set[bool]] = {}
    for row in table_rows:
        splits.setdefault(row["completion"], set()).add(row["split"])
        answers.setdefault(row["completion"], set()).add(row["label"])
    assert [answers[row["said"]] for row in rows[:8]] == [{True, False}] * 8
    assert {len(names) for names in splits.values()} == {1}
    assert len(table_rows) == 16 + 8 + 1


@pytest.mark.usefixtures("compiled_plans")
def test_sources_of_a_mix_may_write_labels_in_their_own_ways(
    prepare_and_commit: Preparer, tmp_path: Path
) -> None:
    table = pa.table({"prompt": ["a?"], "completion": ["yes"], "label": [True]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("prompt,completion,label\nb?,no,0\nc?,yes,true\nd?,yes,?\n")
    sources = [
        {"name": "a", "type": "Parquet", "path": str(tmp_path / "a.parquet"), "weight": 1},
        {"name": "b", "type": "CSV", "path": str(tmp_path / "b.csv"), "weight": 3},
    ]
    result = prepare_and_commit(
        [judged(0)], source={"type": "Mix", "sources": sources}, columns=None, objective=KTO, languages=["en"]
    )
    assert result.columns == Columns(type="Unpaired")
    labelled = {(row["source"], row["prompt"], row["completion"], row["label"]) for row in table_of(result)}
    assert labelled == {("a", "a?", "yes", True), ("b", "b?", "no", False), ("b", "c?", "yes", True)}
    assert [(source.name, source.rows) for source in result.sources or []] == [("a", 1), ("b", 2)]
