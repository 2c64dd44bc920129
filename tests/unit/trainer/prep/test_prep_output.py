"""The output table and its versions: which of them another job uses, and which it leaves alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta.exceptions import ConcurrentAppendException
from deltalake import CommitProperties, DeltaTable, write_deltalake

from finetune_trainer.outcome import DataError
from finetune_trainer.prep import output, pipeline
from finetune_trainer.prep.plan import request
from unit.trainer.prep.recipes import recipe, untold

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult

ROWS = [{"question": f"What is {number}?", "answer": f"It is {number}."} for number in range(20)]
WHOLE = {"train": 1, "validation": 0, "test": 0}


class Jobs:
    """Jobs that prepare the same corpus into the same table: a Delta table in `delta`, or Parquet files in `parquet`."""

    def __init__(self, spark: SparkSession, tokenizer: Path, folder: Path) -> None:
        self.spark, self.tokenizer, self.folder, self.table = spark, tokenizer, folder, folder / "table"
        (folder / "parquet").mkdir()
        self.add(ROWS)

    def add(self, rows: list[dict[str, str]]) -> None:
        """Add rows to both."""
        table, parquet = pa.Table.from_pylist(rows), self.folder / "parquet"
        write_deltalake(self.folder / "delta", table, mode="append")
        pq.write_table(table, parquet / f"{len([*parquet.iterdir()])}.parquet")

    def __call__(self, name: str, kind: str = "Delta", **changes: Any) -> PrepResult:
        """Prepare as the job of this name; `changes` are those of `recipe`, `version` that of the source."""
        source = {
            "type": kind,
            "path": str(self.folder / kind.lower()),
            "version": changes.pop("version", None),
        }
        asked: dict[str, Any] = {"source": source, "splitRatios": WHOLE, "output": str(self.table)}
        wanted = recipe(
            **asked | {"base": str(self.tokenizer), "uid": f"uid-of-{name}", "name": name} | changes
        )
        return pipeline.prepare(self.spark, wanted, request(wanted), self.tokenizer, untold())

    @property
    def versions(self) -> int:
        return len(DeltaTable(self.table).history())


@pytest.fixture
def prepare_as(spark: SparkSession, tokenizer_folder: Path, tmp_path: Path) -> Jobs:
    return Jobs(spark, tokenizer_folder, tmp_path)


def test_a_second_job_uses_the_version_of_the_first(
    prepare_as: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare_as("first")
    capsys.readouterr()
    second = prepare_as("second", image="mine:1", spark={"conf": {"spark.sql.shuffle.partitions": "3"}})
    assert second == first.model_copy(update={"written_by": "first"})
    assert prepare_as.versions == 1
    said = capsys.readouterr().out
    assert (
        f"{prepare_as.table} version 0 was written by FineTuneJob first from the same data with the same settings: "
        "nothing is written\n" in said
    )
    # A pod that is tried again finds it too.
    assert prepare_as("second") == second
    assert (prepare_as("third", namespace="other").version, prepare_as("fourth", reuse="Never").version) == (
        1,
        2,
    )


def test_what_was_read_decides(prepare_as: Jobs) -> None:
    first = prepare_as("first")
    prepare_as.add([{"question": "What is new?", "answer": "This."}])
    second = prepare_as("second")
    assert (second.version, second.rows.train, second.digest == first.digest) == (1, 21, False)
    # A job that names the version of the first one has the same rows.
    third = prepare_as("third", version=0)
    assert (third.version, third.written_by, third.digest) == (0, "first", first.digest)
    # A table that was created again has the same versions, and other rows.
    write_deltalake(prepare_as.folder / "again", pa.Table.from_pylist(ROWS[:5]))
    prepare_as.folder.joinpath("delta").rename(prepare_as.folder / "before")
    prepare_as.folder.joinpath("again").rename(prepare_as.folder / "delta")
    fourth = prepare_as("fourth")
    assert (fourth.version, fourth.source_version, fourth.rows.train, fourth.written_by) == (2, 0, 5, None)


def test_files_are_the_same_while_their_listing_is(prepare_as: Jobs) -> None:
    first = prepare_as("first", "Parquet")
    assert prepare_as("second", "Parquet").written_by == "first"
    prepare_as.add(ROWS[:1])
    third = prepare_as("third", "Parquet")
    assert (third.version, third.written_by, third.digest == first.digest) == (1, None, False)


def test_a_version_without_its_files_is_not_used(prepare_as: Jobs) -> None:
    """As VACUUM leaves it."""
    prepare_as("first")
    prepare_as.add(ROWS[:1])
    prepare_as("second")
    of_first = {*DeltaTable(prepare_as.table, version=0).file_uris()}
    for file in of_first - {*DeltaTable(prepare_as.table).file_uris()}:
        prepare_as.table.joinpath(file.rpartition("/")[2]).unlink()
    third = prepare_as("third", version=0)
    assert (third.version, third.written_by) == (2, None)


def test_the_table_of_another_preparation_is_left_alone(prepare_as: Jobs) -> None:
    prepare_as("first")
    with pytest.raises(DataError) as failed:
        prepare_as("second", maxTokens=1000)
    assert (failed.value.reason, failed.value.message) == (
        "OutputTaken",
        f"data.prepare.output {prepare_as.table} is the table of FineTuneJob default/first, which prepares another source, "
        "with other steps or for another tokenizer: name another folder",
    )
    assert prepare_as.versions == 1
    # What a job wrote itself, as on a laptop, it may replace.
    assert prepare_as("first", maxTokens=1000).version == 1


def test_a_table_of_an_earlier_release_gets_a_new_version(prepare_as: Jobs) -> None:
    said = json.dumps({"job": "uid-of-first", "recipe": "0123", "result": {"path": "/elsewhere"}})
    properties = CommitProperties(custom_metadata={"userMetadata": said})
    write_deltalake(prepare_as.table, pa.table({"id": ["a"]}), commit_properties=properties)
    second = prepare_as("second")
    assert (second.version, second.written_by) == (1, None)


def test_a_commit_that_meets_another_one(prepare_as: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    write, met = output._write, [True, True]

    def meeting(*arguments: Any) -> None:
        if met and met.pop():
            raise ConcurrentAppendException("met another commit")
        write(*arguments)

    # Nothing that this job can use has come meanwhile: it writes again.
    monkeypatch.setattr(output, "_write", meeting)
    first = prepare_as("first")
    assert (first.version, first.written_by, met) == (0, None, [])
    # The other commit has the same rows.
    met.append(True)
    versions, looks = output.versions, [[]]
    monkeypatch.setattr(output, "versions", lambda *where: looks.pop() if looks else versions(*where))
    assert prepare_as("second") == first.model_copy(update={"written_by": "first"})
    assert prepare_as.versions == 1
