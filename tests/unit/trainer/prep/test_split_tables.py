"""Splits that a preparation saves as tables with names, in the catalog of the session."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from delta.exceptions import ProtocolChangedException
from delta.tables import DeltaTable as SparkTable
from deltalake import DeltaTable

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import split_tables
from finetune_trainer.prep.spark import session
from unit.trainer.prep.recipes import recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from finetune_crds.prepare import Prepare
    from unit.trainer.prep.recipes import Json, Preparer

SPLITS = ("train", "validation", "test")
RATIOS = {"train": 0.5, "validation": 0.25, "test": 0.25}
ROWS = [{"question": f"What is in hall {number}?", "answer": f"Table {number}."} for number in range(40)]


@pytest.fixture
def schema(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A schema of the session's catalog, with its folder."""
    (tmp_path / "schema").mkdir()
    spark.sql(f"CREATE DATABASE support LOCATION '{tmp_path}/schema'")
    yield "spark_catalog.support"
    spark.sql("DROP DATABASE support CASCADE")


def named(schema: str, *splits: str) -> Json:
    """Fields of prepare."""
    tables = {split: f"{schema}.chat_{split}" for split in splits or SPLITS}
    return {"splitTables": tables, "splitRatios": RATIOS}


def rows_of(spark: SparkSession, table: str) -> list[Json]:
    return sorted((row.asDict() for row in spark.table(table).collect()), key=lambda row: str(row["id"]))


def versions(folder: Path) -> dict[str, int]:
    """The newest version of each table in the schema."""
    tables = sorted((folder / "schema").iterdir())
    return {table.name: DeltaTable(table).version() for table in tables}


def test_each_split_is_a_table_with_its_name(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    result = prepare_and_commit(ROWS, **named(schema))
    for split in SPLITS:
        expected = [
            {name: row[name] for name in ("id", "prompt", "response", "tokens")}
            for row in table_of(result)
            if row["split"] == split
        ]
        assert expected
        assert rows_of(spark, f"{schema}.chat_{split}") == expected
        # A reader without a JVM opens it too.
        table = DeltaTable(tmp_path / "schema" / f"chat_{split}")
        assert len(table.to_pyarrow_table()) == len(expected)
        assert table.metadata().configuration["delta.enableDeletionVectors"] == "false"


def test_a_preference_has_no_token_ids(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str
) -> None:
    rows = [row | {"worse": "I do not know."} for row in ROWS]
    columns = {"type": "Preference", "prompt": "question", "chosen": "answer", "rejected": "worse"}
    prepare_and_commit(rows, columns=columns, **named(schema, "train"))
    assert spark.table(f"{schema}.chat_train").columns == ["id", "prompt", "chosen", "rejected", "tokens"]


def test_a_table_is_written_once_for_a_version_and_anew_for_the_next(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    output = str(tmp_path / "out")
    corpus = {"type": "Parquet", "path": str(tmp_path / "corpus-0")}

    def run(**changes: Any) -> int | None:
        return prepare_and_commit(
            ROWS, **named(schema, "train", "test") | {"output": output} | changes
        ).version

    assert (run(), versions(tmp_path)) == (0, {"chat_test": 0, "chat_train": 0})
    # The attempt that wrote the output was killed before it saved a split.
    spark.sql(f"DROP TABLE {schema}.chat_test")
    assert (run(source=corpus), versions(tmp_path)) == (0, {"chat_test": 0, "chat_train": 0})
    # Another job reuses the version.
    again = run(source=corpus, uid="uid-2", name="other")
    assert (again, versions(tmp_path)) == (0, {"chat_test": 0, "chat_train": 0})
    # The job prepares other files.
    assert (run(), versions(tmp_path)) == (1, {"chat_test": 1, "chat_train": 1})
    # Somebody changed a table, and the next attempt saves the split again.
    before = rows_of(spark, f"{schema}.chat_train")
    SparkTable.forName(spark, f"{schema}.chat_train").delete()
    run(source={"type": "Parquet", "path": str(tmp_path / "corpus-3")})
    assert versions(tmp_path) == {"chat_test": 1, "chat_train": 3}
    assert rows_of(spark, f"{schema}.chat_train") == before


def of(tables: Json) -> Prepare:
    """data.prepare with fields."""
    prepare = recipe(**tables).data.prepare
    assert prepare
    return prepare


def test_a_commit_that_changes_no_row_is_not_written_over(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    tables = named(schema, "train")
    result = prepare_and_commit(ROWS, **tables)
    spark.sql(f"ALTER TABLE {schema}.chat_train SET TBLPROPERTIES ('team' = 'support')")
    assert [*split_tables.save(spark, of(tables), result)] == []
    assert versions(tmp_path) == {"chat_train": 1}


def test_rows_of_a_later_version_are_kept(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    tables = named(schema, "train") | {"output": str(tmp_path / "out")}
    older = prepare_and_commit(ROWS, **tables)
    newer = prepare_and_commit(ROWS, **tables, minChars=1)
    assert (older.version, newer.version, versions(tmp_path)) == (0, 1, {"chat_train": 1})
    assert [*split_tables.save(spark, of(tables), older)] == [
        f"kept the table {schema}.chat_train: it has the later version 1 of {newer.path}"
    ]
    assert versions(tmp_path) == {"chat_train": 1}
    # An output that was deleted and made anew counts from 0 again.
    shutil.rmtree(tmp_path / "out")
    anew = prepare_and_commit(ROWS, **tables, minChars=2)
    assert (anew.version, versions(tmp_path)) == (0, {"chat_train": 2})


@pytest.mark.parametrize("saves", [True, False], ids=["of this split", "of something else"])
def test_a_conflict_with_another_commit_is_tried_again(
    spark: SparkSession,
    prepare_and_commit: Preparer,
    schema: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    saves: bool,
) -> None:
    tables, attempts, save_split = named(schema, "train"), [], split_tables._save_split

    def conflict(*arguments: Any) -> None:
        attempts.append(arguments)
        if saves or len(attempts) > 1:
            save_split(*arguments)
        if len(attempts) == 1:
            raise ProtocolChangedException("met another commit")

    monkeypatch.setattr(split_tables, "_save_split", conflict)
    prepare_and_commit(ROWS, **tables)
    assert (len(attempts), versions(tmp_path)) == (1 if saves else 2, {"chat_train": 0})
    assert rows_of(spark, f"{schema}.chat_train")


def test_conflicts_without_an_end_fail(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = prepare_and_commit(ROWS)

    def conflict(*_: Any) -> None:
        raise ProtocolChangedException("met another commit")

    monkeypatch.setattr(split_tables, "_save_split", conflict)
    with pytest.raises(ProtocolChangedException):
        list(split_tables.save(spark, of(named(schema, "train")), result))


FIELD = "data.prepare.splitTables.train"
REFUSED: dict[str, tuple[str, str, tuple[str, str]]] = {
    "a table of somebody": (
        "CREATE TABLE support.mine USING delta AS SELECT 1 AS id",
        "spark_catalog.support.mine",
        (
            "OutputTaken",
            "is a table that no preparation saved in its newest 100 commits: use another name, or drop the table",
        ),
    ),
    "a table of another format": (
        "CREATE TABLE support.mine USING parquet AS SELECT 1 AS id",
        "support.mine",
        (
            "OutputTaken",
            "is a table that no preparation saved in its newest 100 commits: use another name, or drop the table",
        ),
    ),
    "a view": (
        "CREATE VIEW support.mine AS SELECT 1 AS id",
        "support.mine",
        (
            "OutputTaken",
            "is a table that no preparation saved in its newest 100 commits: use another name, or drop the table",
        ),
    ),
    "no such schema": (
        "SELECT 1",
        "spark_catalog.nowhere.chat_train",
        (
            "MissingSchema",
            "is in a schema that does not exist: create the schema, or correct the name",
        ),
    ),
}


@pytest.mark.parametrize(("statement", "table", "expected"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("schema")
def test_a_table_that_cannot_be_saved_is_refused_before_the_preparation(
    spark: SparkSession,
    prepare_and_commit: Preparer,
    tmp_path: Path,
    *,
    statement: str,
    table: str,
    expected: tuple[str, str],
) -> None:
    spark.sql(statement)
    with pytest.raises(DataError) as failed:
        prepare_and_commit(ROWS, splitTables={"train": table}, output=str(tmp_path / "out"))
    assert (failed.value.reason, failed.value.message) == (expected[0], f"{FIELD} {table} {expected[1]}")
    assert not (tmp_path / "out").exists()


def test_a_schema_on_the_disk_of_another_machine_is_refused(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    location = (tmp_path / "schema").rename(tmp_path / "elsewhere").with_name("schema")
    with pytest.raises(DataError) as failed:
        prepare_and_commit(ROWS, **named(schema, "train"))
    assert (failed.value.reason, failed.value.message) == (
        "MissingSchema",
        f"{FIELD} {schema}.chat_train is in a schema whose location {location} is not a folder of this pod: mount the volume there, or "
        "use a schema in an object store",
    )
    # A workspace has its own storage.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_RUNTIME, "17.3")
        prepare_and_commit(ROWS, **named(schema, "train"))
    assert rows_of(spark, f"{schema}.chat_train")


def test_a_table_whose_folder_is_not_mounted_is_refused(
    spark: SparkSession, prepare_and_commit: Preparer, schema: str, tmp_path: Path
) -> None:
    prepare_and_commit(ROWS, **named(schema, "train"))
    location = tmp_path / "schema"
    location.rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(DataError, match="is not a folder of this pod: mount the volume there") as failed:
            prepare_and_commit(ROWS, **named(schema, "train"))
        assert failed.value.reason == "MissingSchema"
        # The folder of the schema may be there without that of the table.
        location.mkdir()
        with pytest.raises(DataError, match="does not exist or is not mounted in this pod") as failed:
            prepare_and_commit(ROWS, **named(schema, "train"))
        assert failed.value.reason == "MissingTable"
    finally:
        shutil.rmtree(location, ignore_errors=True)
        (tmp_path / "elsewhere").rename(location)
