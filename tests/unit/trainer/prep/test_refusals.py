"""What a preparation refuses: sources, columns and outputs, each with its reason and its sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from finetune_crds.contract import EXIT_DATA
from finetune_trainer.pod import exit_status
from support.http_server import Answer, serving

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from unit.trainer.prep.corpus import Asker

# Changes to a good recipe, the reason and the sentence; {corpus} is the folder of the corpus.
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "missing path",
        {"source": {"type": "Parquet", "path": "{corpus}/nowhere"}},
        "MissingSource",
        "data.source.path {corpus}/nowhere does not exist: mount the volume, or correct the path",
    ),
    (
        "a model without a tokenizer",
        {"base": "{corpus}/empty"},
        "TokenizerNotFound",
        "model.base {corpus}/empty has no tokenizer: add its tokenizer files, for example tokenizer.json and "
        "tokenizer_config.json, to the folder of its config.json, or choose another model",
    ),
    (
        "no files",
        {"source": {"type": "Parquet", "path": "{corpus}/empty"}},
        "EmptySource",
        "data.source.path {corpus}/empty has no Parquet files",
    ),
    (
        "no Delta table",
        {"source": {"type": "Delta", "path": "{corpus}/parquet"}},
        "MissingSource",
        "data.source.path {corpus}/parquet is not a Delta table: correct the path, or set another type",
    ),
    (
        "a table without a catalog",
        {"source": {"type": "Delta", "table": "main.sales.chats"}},
        "MissingCatalog",
        "data.source.table main.sales.chats needs a catalog: set data.prepare.catalog, or use path with the location of the "
        "table",
    ),
    (
        "missing version",
        {"source": {"type": "Delta", "path": "{corpus}/delta", "version": 7}},
        "MissingVersion",
        "the Delta table {corpus}/delta has no version 7: its newest is 1",
    ),
    (
        "source without rows",
        {"source": {"type": "Delta", "path": "{corpus}/delta"}},
        "NoRows",
        "{corpus}/delta has no rows: check what was written to it",
    ),
    (
        "missing columns",
        {"notNull": ["license"], "splitRatios": {"key": "thread"}},
        "MissingColumn",
        "{corpus}/parquet has no column license and thread: it has answer, quality and question",
    ),
    (
        "columns that are not known",
        {"columns": None, "objective": {"type": "DPO"}},
        "ColumnsUnknown",
        "{corpus}/parquet does not have the columns prompt, chosen and rejected, which objective DPO "
        "requires: it has answer (string), quality (double), question (string); name the columns of an example in data.columns",
    ),
    (
        "a template of a column that is not known",
        {"columns": None, "promptTemplate": "{{quality}}"},
        "ColumnsUnknown",
        "{corpus}/parquet has no columns with well-known names of examples: the templates name quality (double); name the columns of an "
        "example in data.columns",
    ),
    (
        "template with an unknown column and none named",
        {"columns": None, "promptTemplate": "{{question}} {{context}}"},
        "MissingColumn",
        "{corpus}/parquet has no column context: it has answer, quality and question",
    ),
    (
        "labels that are scores",
        {
            "columns": {
                "type": "Unpaired",
                "prompt": "question",
                "completion": "answer",
                "label": "quality",
            },
            "objective": {"type": "KTO"},
        },
        "WrongColumnType",
        "column quality of {corpus}/parquet holds double: labels are booleans, 1 and 0, or the texts true and false",
    ),
    (
        "preferences that are lists of texts",
        {
            "source": {"type": "JSONLines", "path": "{corpus}/pairs.jsonl"},
            "columns": {"type": "Preference"},
            "objective": {"type": "DPO"},
        },
        "WrongColumnType",
        "column chosen of {corpus}/pairs.jsonl holds array<string>: prompts and answers are text, or lists of {role, content}",
    ),
    (
        "template with an unknown column",
        {"promptTemplate": "{{question}} {{context}}"},
        "MissingColumn",
        "{corpus}/parquet has no column context: it has answer, quality and question",
    ),
    (
        "filter with an unknown column",
        {"filter": "language = 'en'"},
        "MissingColumn",
        "data.prepare.filter `language = 'en'` names a column that {corpus}/parquet does not have: it has answer, "
        "quality and question",
    ),
    (
        "filter that fails on a row",
        {"filter": "cast(question AS int) > 0"},
        "FilterFailed",
        "data.prepare.filter `cast(question AS int) > 0` fails on a row of {corpus}/parquet: ",
    ),
    (
        "nothing passes the filters",
        {"minQuality": 0.5, "filter": "quality < 0.5"},
        "NoRowsLeft",
        "data.prepare dropped all 104 rows of {corpus}/parquet: notNull dropped 1, minQuality dropped 51, filter "
        "dropped 52; relax its filters",
    ),
]


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_wrong_data(ask: Asker, changes: dict[str, Any], reason: str, sentence: str) -> None:
    with pytest.raises(exit_status.PodFailure) as failed:
        ask(**_filled(changes, ask.corpus))
    code, message = exit_status.describe(failed.value)
    expected = sentence.replace("{corpus}", str(ask.corpus))
    assert message.error is not None
    reported = message.error.message
    # What Spark has to say about a row comes behind the colon.
    reported = reported[: len(expected)] if expected.endswith(": ") else reported
    assert (code, failed.value.reason, reported) == (EXIT_DATA, reason, expected)
    assert not ask.output.exists()


def test_an_output_that_is_something_else_is_left_alone(ask: Asker, corpus: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    properties = CommitProperties(custom_metadata={"userMetadata": '{"job": "a job of theirs"}'})
    write_deltalake(theirs, pa.table({"a": [1]}), commit_properties=properties)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/_SUCCESS").write_text("")
    for version in range(3):
        write_deltalake(tmp_path / "gap", pa.table({"a": [version]}), mode="append")
    (tmp_path / "gap/_delta_log/00000000000000000001.json").unlink()
    messages = {}
    for name in ("theirs", "files", "gap"):
        with pytest.raises(exit_status.DataError) as failed:
            ask(output=str(tmp_path / name))
        assert failed.value.reason == "OutputTaken"
        messages[name] = failed.value.message.replace(str(tmp_path), "")
    assert messages == {
        "theirs": (
            "data.prepare.output /theirs is a Delta table that was not written by a preparation: use another "
            "folder"
        ),
        "files": "data.prepare.output /files contains files but is not a Delta table: use another folder, or empty it",
        "gap": (
            "the Delta table of data.prepare.output /gap cannot be read, because its log is incomplete (Versions (0, 2) are not "
            "contiguous): use another folder"
        ),
    }
    assert (DeltaTable(theirs).version(), [*(tmp_path / "files").iterdir()]) == (
        0,
        [tmp_path / "files/_SUCCESS"],
    )


def test_credentials_that_the_store_refuses(spark: SparkSession, ask: Asker) -> None:
    closed = b"<Error><Code>InvalidAccessKeyId</Code><Message>no</Message></Error>"
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    with serving(lambda _: Answer(403, closed, {"Content-Type": "application/xml"})) as address:
        for name, value in {
            "endpoint": address,
            "path.style.access": "true",
            "endpoint.region": "us-east-1",
            "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
            "access.key": "key",
            "secret.key": "secret",
        }.items():
            configuration.set(f"fs.s3a.bucket.closed.{name}", value)
        with pytest.raises(exit_status.DataError) as failed:
            ask(source={"type": "Parquet", "path": "s3://closed/corpus"})
    assert (failed.value.reason, failed.value.message) == (
        "AccessDenied",
        "s3://closed/corpus is not accessible with the pod's credentials: grant these credentials access, or correct them",
    )


def _filled(value: Any, corpus: Path) -> Any:
    if isinstance(value, dict):
        return {name: _filled(inner, corpus) for name, inner in value.items()}
    if isinstance(value, str):
        return value.replace("{corpus}", str(corpus)).replace("{{", "{").replace("}}", "}")
    return value
