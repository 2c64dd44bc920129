"""A mix of sources: its shares, its columns, and where its rows come from."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from finetune_crds.contract import PrepResult
from finetune_crds.source import MixedSource
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.steps import mix
from unit.trainer.prep.recipes import WITHOUT_SAMPLES, prepare_quickly, prepared, recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe

Json = dict[str, Any]
WHOLE = {"train": 1, "validation": 0, "test": 0}


def write_sources(folder: Path) -> list[Json]:
    """Write a Delta table of 400 rows, JSON lines of 100, and CSV of 100, of which 10 are in the JSON lines too."""
    questions = [
        {"question": f"What is in table {n}?", "answer": f"Answer {n}.", "stars": n % 5} for n in range(400)
    ]
    write_deltalake(folder / "table", pa.Table.from_pylist(questions))
    instructions = [{"instruction": f"Tell me of hall {n}.", "output": f"Hall {n}."} for n in range(100)]
    (folder / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in instructions))
    lines = [f"Tell me of hall {n}.,Hall {n}.,{n % 5}" for n in range(90, 190)]
    (folder / "lines.csv").write_text("\n".join(["prompt,response,stars", *lines]) + "\n")
    return [
        {"name": "asked", "type": "Delta", "path": str(folder / "table"), "weight": 2},
        {"name": "told", "type": "JSONLines", "path": str(folder / "told.jsonl")},
        {"name": "lines", "type": "CSV", "path": str(folder / "lines.csv"), "weight": 0.5},
    ]


@pytest.fixture
def sources(tmp_path: Path) -> list[Json]:
    return write_sources(tmp_path)


def prepare(
    spark: SparkSession,
    tokenizer: Path,
    folder: Path,
    sources: list[Json],
    run: Callable[[SparkSession, Recipe], PrepResult] = prepare_quickly,
    **changes: Any,
) -> PrepResult:
    """Prepare a mix; `run` runs the preparation."""
    changes = {
        "columns": None,
        "splitRatios": WHOLE,
        "output": str(folder / "out"),
        **WITHOUT_SAMPLES,
    } | changes
    job_recipe = recipe(source={"type": "Mix", "sources": sources}, base=str(tokenizer), **changes)
    return run(spark, job_recipe)


def table_of(result: PrepResult) -> list[Json]:
    rows: list[Json] = DeltaTable(result.path, version=result.version).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: (row["id"], row["source"]))


@pytest.fixture(scope="module")
def mixed(
    spark: SparkSession, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PrepResult]:
    """The folder of the sources, and what the preparation of their mix returned."""
    folder = tmp_path_factory.mktemp("mix")
    return folder, prepare(spark, tokenizer_folder, folder, write_sources(folder), run=prepared)


def test_rows_of_each_source_by_its_weight(mixed: tuple[Path, PrepResult]) -> None:
    _, result = mixed
    rows = table_of(result)
    counts = Counter(row["source"] for row in rows)
    # told limits the mix: all its rows are taken, and of those that lines has too, the rows of lines stay.
    assert counts["told"] == 100 - result.dropped["dedupe"]
    # Four standard deviations of a fair draw of half of 400 and of 100.
    assert abs(counts["asked"] - 200) < 40
    assert abs(counts["lines"] - 50) < 20
    assert list(rows[0]) == [
        "id",
        "prompt",
        "response",
        "source",
        "input_ids",
        "loss_mask",
        "tokens",
        "split",
    ]
    assert [part.to_json() for part in result.sources or []] == [
        {"name": "asked", "rows": counts["asked"], "version": 0},
        {"name": "told", "rows": counts["told"]},
        {"name": "lines", "rows": counts["lines"]},
    ]
    assert (result.source_version, result.to_json()["columns"]) == (
        None,
        {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
    )
    halls = {row["prompt"]: row["response"] for row in rows if row["source"] != "asked"}
    assert halls.items() <= {f"Tell me of hall {n}.": f"Hall {n}." for n in range(190)}.items()


def test_the_same_rows_from_other_files_and_partitions(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, mixed: tuple[Path, PrepResult]
) -> None:
    folder, result = mixed
    first = table_of(result)
    table = DeltaTable(folder / "table").to_pyarrow_table()
    (tmp_path / "files").mkdir()
    for number in range(4):
        part = table.take(pa.array(range(number, table.num_rows, 4)))
        pq.write_table(part, tmp_path / f"files/{number}.parquet")
    asked, *others = write_sources(tmp_path)
    moved = [asked | {"type": "Parquet", "path": str(tmp_path / "files")}, *others]
    again = table_of(prepare(spark, tokenizer_folder, tmp_path, moved))
    assert again == first
    # What two sources have is kept once.
    assert len({row["id"] for row in first}) == len(first)


def test_columns_that_all_sources_have(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, sources: list[Json]
) -> None:
    """A filter reads a column that is a number in one source and text in another, and missing in the third."""
    (tmp_path / "told.jsonl").write_text(json.dumps({"question": "Where?", "answer": "Here."}) + "\n")
    text = (tmp_path / "lines.csv").read_text()
    (tmp_path / "lines.csv").write_text(text.replace("prompt,response", "question,answer"))
    alike = [part | {"weight": weight} for part, weight in zip(sources, (400, 1, 100), strict=True)]
    result = prepare(
        spark,
        tokenizer_folder,
        tmp_path,
        alike,
        columns={"type": "PromptResponse", "prompt": "question", "response": "answer"},
        promptTemplate="Q: {question}",
        responseTemplate=" {answer}",
        filter="coalesce(stars, 4) = 4",
    )
    assert [(part.name, part.rows) for part in result.sources or []] == [
        ("asked", 80),
        ("told", 1),
        ("lines", 20),
    ]
    assert result.dropped["filter"] == 400


REFUSED: list[tuple[str, list[str], Json, str, str]] = [
    (
        "types of examples",
        ["told", "chats"],
        {},
        "ColumnsDiffer",
        "the sources of the mix have different example columns: told has instruction and output; chats has messages; "
        "set data.columns to columns that all of them have, or prepare them separately",
    ),
    (
        "a column that one does not have",
        ["asked", "told"],
        {"columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"}},
        "MissingColumn",
        "{folder}/told.jsonl has no column question and answer: it has instruction and output",
    ),
    (
        "a path",
        ["told", "nowhere"],
        {},
        "MissingSource",
        "data.source.sources[nowhere].path {folder}/nowhere does not exist: mount the volume, or correct the path",
    ),
    (
        "rows",
        ["told", "empty"],
        {},
        "NoRows",
        "{folder}/empty.csv, source empty of the mix, has no rows",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_a_mix_lacks(
    spark: SparkSession,
    tokenizer_folder: Path,
    tmp_path: Path,
    sources: list[Json],
    row: tuple[str, list[str], Json, str, str],
) -> None:
    _, names, changes, reason, sentence = row
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "empty.csv").write_text("instruction,output\n")
    more = [
        {"name": "chats", "type": "JSONLines", "path": str(tmp_path / "chats.jsonl")},
        {"name": "empty", "type": "CSV", "path": str(tmp_path / "empty.csv")},
        {"name": "nowhere", "type": "Parquet", "path": str(tmp_path / "nowhere")},
    ]
    chosen = [part for part in [*sources, *more] if part["name"] in names]
    with pytest.raises(DataError) as failed:
        prepare(spark, tokenizer_folder, tmp_path, chosen, **changes)
    failure = (failed.value.reason, failed.value.message.replace(str(tmp_path), "{folder}"))
    assert failure == (reason, sentence)
    assert not (tmp_path / "out").exists()


def test_the_source_with_the_fewest_rows_for_its_weight_is_taken_whole() -> None:
    def shares(**rows: tuple[float, int]) -> list[float]:
        parts = [
            mix.Part(MixedSource(name=name, type="CSV", weight=weight), None, None)  # type: ignore[arg-type]
            for name, (weight, _) in rows.items()
        ]
        return mix.compute_shares(parts, [count for _, count in rows.values()])

    assert shares(a=(1, 100), b=(1, 100)) == [1, 1]
    assert shares(a=(0.75, 300), b=(0.25, 400)) == [1, 0.25]
    assert shares(a=(3, 1000), b=(1, 100)) == [0.3, 1]
