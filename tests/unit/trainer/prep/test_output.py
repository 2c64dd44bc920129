"""The output table and its versions: which of them another job uses, and which it leaves alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delta.exceptions import ConcurrentAppendException
from deltalake import CommitProperties, DeltaTable, write_deltalake

from finetune_crds.data import Columns, Splits
from finetune_crds.source import Source
from finetune_crds.training import Model
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import output
from finetune_trainer.prep.source import reader
from finetune_trainer.train.data import dataset, encode
from unit.trainer.prep.recipes import prepared, recipe, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_crds.recipe import Recipe
    from unit.trainer.prep.recipes import Preparer

ROWS = [{"question": f"What is {number}?", "answer": f"It is {number}."} for number in range(20)]
# Few steps, since what they do is tested elsewhere.
STEPS: dict[str, Any] = {
    "dedupe": {"exact": False},
    "splitRatios": {"train": 1, "validation": 0, "test": 0},
}


class Jobs:
    """Jobs that prepare the Delta table `delta` into the table `out`."""

    def __init__(self, spark: SparkSession, tokenizer: Path, folder: Path) -> None:
        self.spark, self.tokenizer = spark, tokenizer
        self.delta, self.table = folder / "delta", folder / "out"
        write_deltalake(self.delta, pa.Table.from_pylist(ROWS))

    def recipe(self, name: str, **changes: Any) -> Recipe:
        """The recipe of the job of this name; `version` is that of the source."""
        source = {"type": "Delta", "path": str(self.delta), "version": changes.pop("version", None)}
        defaults: dict[str, Any] = {"source": source, "output": str(self.table), "base": str(self.tokenizer)}
        return recipe(**STEPS | defaults | {"uid": f"uid-of-{name}", "name": name} | changes)

    def __call__(self, name: str, **changes: Any) -> PrepResult:
        """Prepare as the job of this name."""
        job_recipe = self.recipe(name, **changes)
        return prepared(self.spark, job_recipe)

    def find_reusable(self, name: str, digest: str | None, **changes: Any) -> PrepResult | None:
        """The version of another job that the job of this name would use for rows with a digest."""
        job_recipe, path = self.recipe(name, **changes), str(self.table)
        versions = output.list_versions(self.spark, job_recipe, path)
        return output.find_reusable_result(self.spark, versions, job_recipe, path, digest or "")

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
    second = prepare_as("second", image="mine:1", reportSamples=0)
    assert second == first.model_copy(update={"written_by": "first"})
    assert prepare_as.versions == 1
    log = capsys.readouterr().out
    assert (
        f"{prepare_as.table} version 0 was already written by FineTuneJob first from the same data with the same "
        "settings: reusing it\n" in log
    )
    # A pod that is tried again finds it too; a job of another namespace does not.
    assert prepare_as.find_reusable("second", first.digest) == second
    assert prepare_as.find_reusable("second", first.digest, namespace="other") is None
    alone = prepare_as("alone", reuse="Never")
    assert (alone.version, alone.written_by, alone.digest) == (1, None, first.digest)
    newest = prepare_as.find_reusable("third", first.digest)
    assert (newest and newest.version, newest and newest.written_by) == (1, "alone")

    with pytest.raises(DataError) as failed:
        prepare_as("third", maxTokens=1000)
    assert (failed.value.reason, failed.value.message) == (
        "OutputTaken",
        f"data.prepare.output {prepare_as.table} belongs to FineTuneJob default/first, whose source, preparation "
        "steps or tokenizer differ: use another folder",
    )

    # As VACUUM leaves the older version; the newer one is found.
    (file,) = DeltaTable(prepare_as.table, version=0).file_uris()
    prepare_as.table.joinpath(file.rpartition("/")[2]).unlink()
    reused = prepare_as.find_reusable("fourth", first.digest)
    assert (reused and reused.version, reused and reused.written_by) == (1, "alone")
    (file,) = DeltaTable(prepare_as.table).file_uris()
    prepare_as.table.joinpath(file.rpartition("/")[2]).unlink()
    assert prepare_as.find_reusable("fourth", first.digest) is None


def test_the_version_that_is_read_decides(prepare_as: Jobs) -> None:
    first = prepare_as("first")
    new = [{"question": "What is new?", "answer": "This."}]
    write_deltalake(prepare_as.delta, pa.Table.from_pylist(new), mode="append")
    second = prepare_as("second")
    assert (second.version, second.rows.train, second.written_by) == (1, 21, None)
    assert second.digest != first.digest
    # A job that names the version of the first one has the same rows.
    third = prepare_as("third", version=0)
    assert (third.version, third.written_by, third.digest) == (0, "first", first.digest)


def test_a_table_that_is_created_again_is_another_source(prepare_as: Jobs, tmp_path: Path) -> None:
    source = Source(type="Delta", path=str(prepare_as.delta))
    before = reader.read(prepare_as.spark, source, tmp_path).identity
    assert reader.read(prepare_as.spark, source, tmp_path).identity == before
    prepare_as.delta.rename(tmp_path / "before")
    write_deltalake(prepare_as.delta, pa.Table.from_pylist(ROWS[:5]))
    again = reader.read(prepare_as.spark, source, tmp_path)
    assert (again.version, again.identity != before) == (0, True)


def test_files_are_the_same_while_their_listing_is(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    source = Source(type="Parquet", path=str(folder))
    identities: list[str] = []
    for name, rows in (("a", ROWS), ("b", ROWS[:1]), ("a", ROWS[1:])):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        identities.append(reader.read(spark, source, tmp_path).identity)
        assert reader.read(spark, source, tmp_path).identity == identities[-1]
    assert len({*identities}) == 3


def test_a_job_may_replace_what_it_wrote(prepare_as: Jobs) -> None:
    """As people do who try settings on their own machine; and nobody uses the table of an earlier release."""
    for job in ("uid-of-first", "uid-of-old"):
        metadata: dict[str, Any] = {"job": job, "recipe": "0123", "result": {"path": "/elsewhere"}}
        if job == "uid-of-first":
            metadata |= {"name": "first", "namespace": "default", "settings": "4567"}
        properties = CommitProperties(custom_metadata={"userMetadata": json.dumps(metadata)})
        write_deltalake(
            prepare_as.table, pa.table({"id": ["a"]}), mode="overwrite", commit_properties=properties
        )
    assert prepare_as.find_reusable("first", "0123") is None
    with pytest.raises(DataError, match="belongs to FineTuneJob default/first"):
        prepare_as.find_reusable("second", "0123")


def test_a_commit_that_meets_another_one(prepare_as: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    write, met = output._write, [True]

    def meeting(*arguments: Any) -> None:
        if met:
            met.pop()
            raise ConcurrentAppendException("met another commit")
        write(*arguments)

    # Nothing that this job can use has come meanwhile: it writes again.
    monkeypatch.setattr(output, "_write", meeting)
    first = prepare_as("first")
    assert (first.version, first.written_by, met) == (0, None, [])
    # The other commit, which this job has not seen before, has the same rows.
    met.append(True)
    versions = output.list_versions
    looks: list[list[output.Version]] = [[]]
    monkeypatch.setattr(output, "list_versions", lambda *where: looks.pop() if looks else versions(*where))
    assert prepare_as("second") == first.model_copy(update={"written_by": "first"})
    assert prepare_as.versions == 1


def read_by_training(result: PrepResult, tokenizer: Path, folder: Path) -> tuple[str, list[int]]:
    """The digest of the training split, and its tokens in their order."""
    columns = Columns(type="PromptResponse", prompt="prompt", response="response")
    documents = Documents(load_tokenizer(Model(base="tiny"), tokenizer), columns, answers_only=True)
    encoder = encode.Encoder(documents, max_length=64, truncation="Drop")
    splits = Splits(type="Delta", path=result.path, version=result.version)
    assert dataset.tokenize(splits, "train", encoder, folder, prepared=True)
    split = dataset.Split.load(folder)
    return split.digest, split.tokens.tolist()


def ids_by_file(result: PrepResult) -> list[list[str]]:
    files = DeltaTable(result.path, version=result.version).file_uris()
    return sorted(pq.read_table(file)["id"].to_pylist() for file in files)


def test_a_table_of_several_files_has_the_same_rows(
    prepare_and_commit: Preparer, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = prepare_and_commit
    single = prepare(ROWS, **STEPS)
    monkeypatch.setattr(output, "_TOKENS_PER_FILE", single.tokens.train // 4 + 1)
    four, again = (prepare(ROWS, partitions=partitions, **STEPS) for partitions in (1, 4))
    assert [len(ids_by_file(result)) for result in (single, four, again)] == [1, 4, 4]
    assert ids_by_file(four) == ids_by_file(again)
    assert table_of(single) == table_of(four) == table_of(again)
    read = [
        read_by_training(result, tokenizer_folder, tmp_path / str(n))
        for n, result in enumerate((single, four))
    ]
    assert read[0] == read[1]
    assert len(read[0][1]) == single.tokens.train
