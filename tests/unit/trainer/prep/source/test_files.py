"""Files and Delta tables as sources: what is read, and what cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.source import files, reader
from finetune_trainer.prep.source.files import has_subfolders
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rows(spark: SparkSession, folder: Path, **of: Any) -> list[dict[str, Any]]:
    """The rows of a source, as a preparation reads them."""
    request = build_request(recipe(source=of))
    with spark_errors.translate_errors(request):
        return [
            row.asDict(recursive=True) for row in reader.read(spark, request.source, folder).frame.collect()
        ]


def failed(spark: SparkSession, folder: Path, **of: Any) -> tuple[str, str]:
    """The reason and the sentence of a source that cannot be read; `folder` is left out of the sentence."""
    with pytest.raises(DataError) as raised:
        rows(spark, folder, **of)
    return raised.value.reason, raised.value.message.replace(f"{folder}/", "")


def test_csv(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "corpus.csv"
    file.write_text(
        'question,answer,quality\n"say ""é""","one\ntwo",0.5\nback\\slash,,none\n', encoding="utf-8"
    )
    assert rows(spark, tmp_path, type="CSV", path=str(file)) == [
        {"question": 'say "é"', "answer": "one\ntwo", "quality": "0.5"},
        {"question": "back\\slash", "answer": None, "quality": "none"},
    ]


# Text of a.csv and b.jsonl, and what the sentence says of the file.
BROKEN: dict[str, tuple[str, dict[str, str], str]] = {
    "too few values": (
        "CSV",
        {"a.csv": "q,a\nx,y\nz\n"},
        "a.csv cannot be read: Malformed CSV record: z",
    ),
    "too many values": (
        "CSV",
        {"a.csv": "q,a\nx,y\nz,1,2\n"},
        "a.csv cannot be read: Malformed CSV record: z,1,2",
    ),
    "a quote that is not closed": (
        "CSV",
        {"a.csv": 'q,a\nx,"y\nz,"w"\n'},
        "a.csv cannot be read: Unescaped quote character '\"' inside quoted value of CSV field",
    ),
    "columns in another order": (
        "CSV",
        {"a.csv": "q,a\nx,y\n", "b.csv": "a,q\ny,x\n"},
        "b.csv cannot be read: its header repeats a column, or differs from the header of another file",
    ),
    "a line that was cut": (
        "JSONLines",
        {"a.jsonl": json.dumps({"q": "x"}) + "\n", "b.jsonl": '{"q": "x"}\n{"q":\n'},
        "b.jsonl cannot be read: Unexpected end-of-input within/between Object entries",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_line_that_does_not_parse_is_refused_with_its_file(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    form, files, sentence = BROKEN[kind]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert failed(spark, tmp_path, type=form, path=str(tmp_path)) == (
        "UnreadableSource",
        f"{sentence}; fix or remove the file",
    )


# Paths of files, and whether some are in subfolders of corpora/chat.
FOLDERS: dict[str, tuple[list[str], bool]] = {
    "the file itself": (["s3a://corpora/chat"], False),
    "files": (["s3a://corpora/chat/a.jsonl", "s3a://corpora/chat/b.jsonl"], False),
    "a subfolder": (["s3a://corpora/chat/2024/05/a.jsonl"], True),
    "a subfolder beside a file": (["s3a://corpora/chat/a.jsonl", "s3a://corpora/chat/2024/b.jsonl"], True),
    "partitions": (["s3a://corpora/chat/year=2024/a.jsonl", "s3a://corpora/chat/year=2025/b.jsonl"], False),
    "files below partitions": (["s3a://corpora/chat/year=2024/part/a.jsonl"], False),
    "nothing": ([], False),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_subfolders_that_are_no_partitions(case: str) -> None:
    paths, expected = FOLDERS[case]
    assert has_subfolders("s3a://corpora/chat/", paths) == expected
    local = [path.replace("s3a://", "file:/data/") for path in paths]
    assert has_subfolders("/data/corpora/chat", local) == expected


def test_the_name_of_the_folder_itself_is_no_partition() -> None:
    assert has_subfolders("/data/run=5", ["file:/data/run=5/a.jsonl", "file:/data/run=5/more/b.jsonl"])


def test_partitions_beside_other_subfolders_are_refused() -> None:
    with pytest.raises(
        DataError, match="/c has partitions such as year=2024, and other subfolders such as more: "
    ):
        has_subfolders("/c", ["file:/c/year=2024/a.jsonl", "file:/c/more/b.jsonl"])


def test_subfolders_are_read(spark: SparkSession, tmp_path: Path) -> None:
    for number, name in enumerate(("a", "2024/05/b", "2024/c", "_drafts/d", "2024/_e", "2024/.f")):
        file = tmp_path / "corpus" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"n": number}))
    read_rows = rows(spark, tmp_path, type="JSONLines", path=str(tmp_path / "corpus"))
    assert sorted(row["n"] for row in read_rows) == [0, 1, 2]


def test_partitions_of_files_are_columns(spark: SparkSession, tmp_path: Path) -> None:
    for year in (2024, 2025):
        file = tmp_path / "corpus" / f"year={year}" / "a.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"n": year - 2024}))
    read_rows = rows(spark, tmp_path, type="JSONLines", path=str(tmp_path / "corpus"))
    assert sorted((row["n"], row["year"]) for row in read_rows) == [(0, 2024), (1, 2025)]


def messages(**fields: Any) -> pa.Array:
    return pa.array([[{"role": "assistant", "content": "a", **fields}]])


# Tables of Parquet files, and the rows that both make.
MERGED: dict[str, tuple[list[pa.Table], list[Any]]] = {
    "a field of messages": (
        [pa.table({"m": messages()}), pa.table({"m": messages(weight=0)})],
        [
            [{"role": "assistant", "content": "a", "weight": None}],
            [{"role": "assistant", "content": "a", "weight": 0}],
        ],
    ),
    "a column": ([pa.table({"n": [1]}), pa.table({"n": [1], "m": ["x"]})], [None, "x"]),
    "integers of other sizes": (
        [pa.table({"m": pa.array([1], pa.int32())}), pa.table({"m": pa.array([2**40], pa.int64())})],
        [1, 2**40],
    ),
    "an integer and a double": (
        [pa.table({"m": pa.array([1], pa.int32())}), pa.table({"m": [0.5]})],
        [0.5, 1.0],
    ),
    "a column without values": (
        [pa.table({"n": [1], "m": pa.array([None], pa.null())}), pa.table({"n": [1], "m": ["x"]})],
        [None, "x"],
    ),
    "a field of another type, and one that is new": (
        [
            pa.table({"m": messages(weight=pa.scalar(1, pa.int32()))}),
            pa.table({"m": messages(weight=0.5, name="it")}),
        ],
        [
            [{"role": "assistant", "content": "a", "weight": 0.5, "name": "it"}],
            [{"role": "assistant", "content": "a", "weight": 1.0, "name": None}],
        ],
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_files_of_parquet_with_other_schemas(case: str, spark: SparkSession, tmp_path: Path) -> None:
    tables, expected = MERGED[case]
    for number, table in enumerate(tables):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "corpus" / f"[{number}].parquet")
    read_rows = rows(spark, tmp_path, type="Parquet", path=str(tmp_path / "corpus"))
    assert sorted((row["m"] for row in read_rows), key=str) == sorted(expected, key=str)


def test_files_of_partitions_with_other_types(spark: SparkSession, tmp_path: Path) -> None:
    """The column `input` is empty in each file, and a column all the same."""
    for year, kind in {2024: pa.int32(), 2025: pa.int64()}.items():
        folder = tmp_path / "corpus" / f"year={year}"
        folder.mkdir(parents=True)
        table = pa.table({"m": pa.array([1], kind), "input": pa.array([None], pa.string())})
        pq.write_table(table, folder / "a.parquet")
    read_rows = rows(spark, tmp_path, type="Parquet", path=str(tmp_path / "corpus"))
    assert sorted(read_rows, key=str) == [
        {"m": 1, "year": 2024, "input": None},
        {"m": 1, "year": 2025, "input": None},
    ]


def test_types_that_no_type_holds_are_refused_with_their_files(spark: SparkSession, tmp_path: Path) -> None:
    for name, value in {"a": 2**40, "b": "x"}.items():
        pq.write_table(pa.table({"m": [{"of": value}]}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "0.parquet")
    reason, sentence = failed(spark, tmp_path, type="Parquet", path=str(tmp_path))
    assert reason == "WrongColumnType"
    first, second = sorted(
        [("a.parquet", "bigint"), ("b.parquet", "string")],
        key=lambda pair: f" in {pair[0]}, and " not in sentence,
    )
    assert sentence == (
        f"column m.of holds {first[1]} in {first[0]}, and {second[1]} in {second[0]}: write the column with one type in all files"
    )


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A Delta table whose versions 0 to 2 hold their own number."""
    for version in range(3):
        write_deltalake(tmp_path / "table", pa.table({"version": [version]}), mode="overwrite")
    return str(tmp_path / "table")


def committed(table: str) -> list[datetime]:
    """When each version was committed: when its log was written, in milliseconds."""
    logs = sorted(Path(table).glob("_delta_log/*.json"))
    return [datetime.fromtimestamp(log.stat().st_mtime_ns // 1_000_000 / 1000, UTC) for log in logs]


def test_the_version_that_was_current_at_a_time(spark: SparkSession, table: str, tmp_path: Path) -> None:
    times = committed(table)
    later = times[1] + timedelta(microseconds=500)
    versions = []
    for time in (times[0], later, times[2] + timedelta(milliseconds=1)):
        source = Source(type="Delta", path=table, version_time=time)
        corpus = reader.read(spark, source, tmp_path)
        versions.append((corpus.version, [row["version"] for row in corpus.frame.collect()]))
    assert versions == [(0, [0]), (1, [1]), (2, [2])]


def test_a_time_without_a_version(spark: SparkSession, table: str, tmp_path: Path) -> None:
    began = committed(table)[0]
    assert failed(spark, tmp_path, type="Delta", path=table, versionTime="2020-01-01T00:00:00Z") == (
        "VersionGone",
        f"the log of the Delta table table begins with version 0 at {began.isoformat(timespec='seconds')}, after "
        "data.source.versionTime 2020-01-01T00:00:00+00:00: name a later time",
    )
    assert failed(spark, tmp_path, type="Delta", path=table, versionTime="2100-01-01T00:00:00Z") == (
        "MissingVersion",
        "data.source.versionTime 2100-01-01T00:00:00+00:00 is in the future: name a time that has passed",
    )


def test_a_version_whose_files_or_log_are_gone(spark: SparkSession, table: str, tmp_path: Path) -> None:
    written = DeltaTable(table)
    before = committed(table)[0].isoformat()
    assert len(written.vacuum(0, dry_run=False, enforce_retention_duration=False)) == 2
    because = (
        "can no longer be read, because VACUUM or the cleanup of its log removed files: use a newer version"
    )
    expected = ("VersionGone", f"version 0 of the Delta table table {because}")
    assert failed(spark, tmp_path, type="Delta", path=table, version=0) == expected
    assert failed(spark, tmp_path, type="Delta", path=table, versionTime=before) == (
        "VersionGone",
        f"the version of {before} of the Delta table table {because}",
    )
    written.create_checkpoint()
    (tmp_path / "table/_delta_log/00000000000000000000.json").unlink()
    assert failed(spark, tmp_path, type="Delta", path=table, version=0) == expected
    assert rows(spark, tmp_path, type="Delta", path=table) == [{"version": 2}]


def get_log(table: str, version: int) -> Path:
    return Path(table) / f"_delta_log/{version:020}.json"


def add_feature(table: str) -> None:
    """Let the newest version require a feature that no reader has."""
    features = ["teleportation"]
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": features,
    }
    with get_log(table, 2).open("a") as log:
        log.write(f"\n{json.dumps({'protocol': protocol})}\n")


def remove_protocol(table: str) -> None:
    actions = get_log(table, 0).read_text().splitlines()
    get_log(table, 0).write_text("\n".join(action for action in actions if "protocol" not in action))


def damage_checkpoint(table: str) -> None:
    """Leave nothing of the log but a checkpoint that ends early."""
    DeltaTable(table).create_checkpoint()
    for version in range(3):
        get_log(table, version).unlink()
    (checkpoint,) = Path(table).glob("_delta_log/*.checkpoint.parquet")
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])


INCOMPLETE = (
    r"the Delta table table cannot be read, because its log is incomplete \({}\): restore the missing files of _delta_log, or write the "
    "table again"
)
# What is done to a table of three versions, the reason, and a pattern of the sentence.
BROKEN_TABLES: dict[str, tuple[Callable[[str], None], str, str]] = {
    "a feature that no reader has": (
        add_feature,
        "UnsupportedTable",
        r"the Delta table table requires features that the preparation does not read \(teleportation\): drop these features with ALTER TABLE "
        r"\.\.\. DROP FEATURE, or write the table again without them",
    ),
    "a commit is missing": (
        lambda table: get_log(table, 1).unlink(),
        "UnreadableSource",
        INCOMPLETE.format(r"Versions \(0, 2\) are not contiguous"),
    ),
    "the first commit is missing": (
        lambda table: get_log(table, 0).unlink(),
        "UnreadableSource",
        INCOMPLETE.format(".*Unable to reconstruct state at version 2.*"),
    ),
    "the protocol is missing": (
        remove_protocol,
        "UnreadableSource",
        INCOMPLETE.format("The protocol of your Delta table could not be recovered.*"),
    ),
    "a checkpoint is damaged, and the commits before it are gone": (
        damage_checkpoint,
        "UnreadableSource",
        INCOMPLETE.format("Could not find any delta files for version 2"),
    ),
}


@pytest.mark.parametrize("case", BROKEN_TABLES)
def test_a_table_whose_log_cannot_be_read(spark: SparkSession, table: str, tmp_path: Path, case: str) -> None:
    change, reason, sentence = BROKEN_TABLES[case]
    change(table)
    reported_reason, message = failed(spark, tmp_path, type="Delta", path=table)
    assert reported_reason == reason
    assert re.fullmatch(sentence, message), message


def test_files_of_a_store_leave_hadoop_its_reader_of_local_files() -> None:
    """Its clients of stores keep parts of files in local ones, which they read by it."""
    readers = [
        files._literal({}, [path]).get("fs.file.impl")
        for path in ("/corpus", "file:/corpus", "s3a://corpora/a", "gs://a")
    ]
    assert readers == ["org.apache.hadoop.fs.RawLocalFileSystem"] * 2 + [None] * 2
