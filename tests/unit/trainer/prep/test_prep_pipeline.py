"""The preparation from source to table: what is written, found again, counted and refused."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from finetune_crds.contract import EXIT_DATA, PrepResult
from finetune_crds.data import Columns
from finetune_crds.training import ModelCache
from finetune_trainer import outcome
from finetune_trainer.cache import Cache
from finetune_trainer.prep import output, pipeline
from finetune_trainer.prep.report import Facts
from support.http_server import Answer, serving
from unit.trainer.prep.recipes import PAIR_TOKENS, prepared, recipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe

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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows as Parquet in `parquet`, as JSON lines in `lines.jsonl`, and as a Delta table in `delta`.

    `pairs.jsonl` has a preference whose chosen answer is a list of texts.

    Version 0 of the table has the rows, version 1 none.
    """
    folder = tmp_path_factory.mktemp("corpus")
    table = pa.Table.from_pylist(ROWS + DIRTY)
    (folder / "parquet").mkdir()
    pq.write_table(table, folder / "parquet" / "part-0.parquet")
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS + DIRTY))
    pair = {"prompt": "why", "chosen": ["so"], "rejected": "no"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    write_deltalake(folder / "delta", table)
    write_deltalake(folder / "delta", table.slice(0, 0), mode="overwrite")
    return folder


def prepare(spark: SparkSession, asked: Recipe, shown: list[Facts] | None = None) -> PrepResult:
    return prepared(spark, asked, (lambda _: None) if shown is None else shown.append)


class Asker:
    """Prepares the corpus with changes to a good recipe."""

    def __init__(self, spark: SparkSession, corpus: Path, tokenizer: Path, output: Path) -> None:
        self.spark, self.corpus, self.tokenizer, self.output = spark, corpus, tokenizer, output
        self.shown: list[Facts] = []

    def __call__(self, **changes: Any) -> PrepResult:
        changes = {
            "source": {"type": "Parquet", "path": str(self.corpus / "parquet")},
            "base": str(self.tokenizer),
            "output": str(self.output),
        } | changes
        return prepare(self.spark, recipe(**changes), self.shown)


@pytest.fixture
def ask(spark: SparkSession, corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> Asker:
    return Asker(spark, corpus, tokenizer_folder, tmp_path / "table")


def table_of(result: PrepResult) -> list[dict[str, Any]]:
    """The rows of the table at the result's version, as a reader without a JVM sees them."""
    rows = DeltaTable(result.path, version=result.version).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def counted(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Rows and tokens of each split."""
    made = {
        "rows": {"train": 0, "validation": 0, "test": 0},
        "tokens": {"train": 0, "validation": 0, "test": 0},
    }
    for row in rows:
        made["rows"][row["split"]] += 1
        made["tokens"][row["split"]] += row["tokens"]
    return made


def test_the_table_holds_what_the_result_says(ask: Asker, corpus: Path, tmp_path: Path) -> None:
    results, tables = [], []
    sources = [("Parquet", "parquet", None), ("JSONLines", "lines.jsonl", None), ("Delta", "delta", 0)]
    for kind, name, version in sources:
        source = {"type": kind, "path": str(corpus / name), "version": version}
        results.append(ask(source=source, output=str(tmp_path / name), **STEPS))
        tables.append(table_of(results[-1]))
    assert tables[0] == tables[1] == tables[2]
    for result, (_, name, version) in zip(results, sources, strict=True):
        assert result.to_json() == {
            **counted(tables[0]),
            "path": str(tmp_path / name),
            "version": 0,
            "dropped": DROPPED,
            "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
            "digest": result.digest,
            **({} if version is None else {"sourceVersion": version}),
        }
    assert list(tables[0][0]) == ["id", "prompt", "response", "input_ids", "loss_mask", "tokens", "split"]
    wanted = {(f"Q: {row['question']}\nA:", f" {row['answer']}") for row in ROWS + DIRTY}
    assert {(row["prompt"], row["response"]) for row in tables[0]} <= wanted
    assert len({row["id"] for row in tables[0]}) == 70


def test_near_duplicates_are_removed_and_counted(
    ask: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {
        "question": "What is in the old table beside the window of the hall?",
        "answer": "An answer of more words",
    }
    others = [{"question": long["question"], "answer": f"{long['answer']} {end}"} for end in ("than", "then")]
    pq.write_table(pa.Table.from_pylist([long, *others, *ROWS[:5]]), tmp_path / "corpus.parquet")
    source = {"type": "Parquet", "path": str(tmp_path / "corpus.parquet")}
    result = ask(source=source, dedupe={"near": {}}, splitRatios={"train": 1, "validation": 0, "test": 0})
    assert result.dropped == {"notNull": 0, "dedupe": 0, "near": 2}
    assert len(table_of(result)) == result.rows.train == 6
    assert (
        "near duplicates: 3 examples, of which 1 stays; the largest cluster has 3\n"
        in capsys.readouterr().out
    )


def test_a_pod_that_is_tried_again_finds_its_version(ask: Asker, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = ask(uid="one", **STEPS), ask(uid="one", **STEPS)
    said = capsys.readouterr().out
    other_recipe = ask(uid="one", **STEPS | {"limit": 50})
    assert again == first
    assert f"{ask.output} version 0 was made by this job before: nothing is written twice\n" in said
    assert [result.version for result in (first, other_recipe)] == [0, 1]
    table = DeltaTable(ask.output)
    assert table.version() == 1
    # Readers without a JVM need tables without deletion vectors.
    assert table.metadata().configuration.get("delta.enableDeletionVectors") == "false"
    assert len(table.file_uris()) == 1


def test_a_pod_that_looked_before_the_commit_of_another_writes_nothing(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(**STEPS)
    versions, looks = output.versions, itertools.count()
    monkeypatch.setattr(output, "versions", lambda *where: [] if next(looks) == 0 else versions(*where))
    assert ask(**STEPS) == first
    assert DeltaTable(ask.output).version() == 0


def test_two_pods_at_once_write_one_version(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prepare, and commit at the same moment; Delta may refuse one of them, which is then tried again."""
    commit, both = output.commit, threading.Barrier(2, timeout=120)

    def together(*arguments: Any) -> PrepResult:
        both.wait()
        return commit(*arguments)

    def pod(_: int) -> PrepResult | Exception:
        try:
            return ask(**STEPS)
        except Exception as error:  # noqa: BLE001
            return error

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pods:
        patch.setattr(output, "commit", together)
        results = list(pods.map(pod, range(2)))
    kept = ask(**STEPS)
    committed = [result for result in results if isinstance(result, PrepResult)]
    assert committed in ([kept], [kept, kept])
    assert DeltaTable(ask.output).version() == kept.version == 0


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"type": "Text", "text": "question"}, ["id", "text", "input_ids", "loss_mask", "tokens", "split"]),
        (
            {"type": "PromptResponse", "prompt": "question", "response": "answer"},
            ["id", "prompt", "response", "input_ids", "loss_mask", "tokens", "split"],
        ),
        (
            {"type": "Messages", "messages": "chat"},
            ["id", "messages", "input_ids", "loss_mask", "tokens", "split"],
        ),
    ],
)
def test_columns_of_the_table(
    ask: Asker, tmp_path: Path, columns: dict[str, Any], expected: list[str]
) -> None:
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    row = {"question": "why", "answer": "so", "chat": json.dumps(chats)}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    source = {"type": "JSONLines", "path": str(tmp_path / "corpus.jsonl")}
    (made,) = table_of(
        ask(source=source, columns=columns, splitRatios={"train": 1, "validation": 0, "test": 0})
    )
    # JSON text may have these fields in any row.
    nothing = dict.fromkeys(
        ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking", "weight")
    )
    turns = [chat | nothing for chat in chats]
    values = {"text": "why", "prompt": "why", "response": "so", "messages": turns}
    assert list(made) == expected
    assert [made[name] for name in expected if name in values] == [
        values[name] for name in expected if name in values
    ]


def test_columns_are_found_in_the_schema(
    ask: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = pa.struct([("content", pa.string()), ("role", pa.string()), ("weight", pa.int64())])
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    row = {"messages": chats, "prompt": "hi", "prompt_id": 1}
    fields = [("messages", pa.list_(turn)), ("prompt", pa.string()), ("prompt_id", pa.int64())]
    pq.write_table(pa.Table.from_pylist([row], pa.schema(fields)), tmp_path / "chats.parquet")
    whole = {"train": 1, "validation": 0, "test": 0}
    source = {"type": "Parquet", "path": str(tmp_path / "chats.parquet")}
    found = ask(source=source, columns=None, splitRatios=whole)
    assert found.columns == Columns(type="Messages", messages="messages")
    assert "columns messages\n" in capsys.readouterr().out
    (made,) = table_of(found)
    assert (list(made), made["messages"]) == (
        ["id", "messages", "input_ids", "loss_mask", "tokens", "split"],
        [chat | {"weight": None} for chat in chats],
    )
    # A pod that is tried again still knows.
    assert ask(source=source, columns=None, splitRatios=whole) == found


def test_preferences_come_through_every_step(ask: Asker, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"ask": f"Where is table {number}?", "good": f"In hall {number}.", "bad": f"Nowhere near {number}."}
        for number in range(30)
    ]
    dirty: list[dict[str, Any]] = [
        rows[0] | {"ask": "WHERE IS  table 0?"},  # the same but for case and white space
        rows[1] | {"bad": "Not in hall 1."},  # another preference of the same prompt
        rows[2] | {"good": " "},
        rows[3] | {"bad": None},
        rows[4] | {"ask": None},
        rows[5] | {"bad": "nowhere, " * 100},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + dirty))
    result = ask(
        source={"type": "JSONLines", "path": str(tmp_path / "corpus.jsonl")},
        columns={"type": "Preference", "prompt": "ask", "chosen": "good", "rejected": "bad"},
        promptTemplate="Q: {ask}\nA:",
        maxTokens=200,
        limit=25,
        splitRatios={"train": 0.8, "validation": 0.2, "test": 0},
    )
    made = table_of(result)
    assert result.dropped == {"notNull": 3, "dedupe": 1, "maxTokens": 1, "limit": 6}
    assert (result.to_json()["rows"], result.to_json()["tokens"]) == tuple(counted(made).values())
    assert list(made[0]) == ["id", "prompt", "chosen", "rejected", *PAIR_TOKENS, "tokens", "split"]
    wanted = {(f"Q: {row['ask']}\nA:", row["good"], row["bad"]) for row in [*rows, *dirty[:2]]}
    assert {(row["prompt"], row["chosen"], row["rejected"]) for row in made} <= wanted
    assert len(made) == 25


# Changes to a good recipe, the reason and the sentence; {corpus} is the folder of the corpus.
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "missing path",
        {"source": {"type": "Parquet", "path": "{corpus}/nowhere"}},
        "MissingSource",
        "data.source.path {corpus}/nowhere does not exist: mount the volume or correct it",
    ),
    (
        "a model without a tokenizer",
        {"base": "{corpus}/empty"},
        "TokenizerNotFound",
        "model.base {corpus}/empty has no tokenizer: put the files of its tokenizer, such as tokenizer.json and "
        "tokenizer_config.json, beside its config.json, or name a model that has them",
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
        "data.source.path {corpus}/parquet is not a Delta table: correct it, or set another type",
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
        "{corpus}/parquet does not have the columns prompt, chosen and rejected, which objective DPO needs: it has answer "
        "(string), quality (double), question (string); name them in data.columns",
    ),
    (
        "a template of a column that is not known",
        {"columns": None, "promptTemplate": "{{quality}}"},
        "ColumnsUnknown",
        "{corpus}/parquet has no columns that are known to hold an example: the templates name quality (double); name "
        "them in data.columns",
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
        "none of the 104 rows of {corpus}/parquet is left: notNull dropped 1, minQuality dropped 51, filter dropped "
        "52; loosen data.prepare",
    ),
    (
        "nothing is short enough",
        {"maxTokens": 1},
        "NoRowsLeft",
        "none of the 104 rows of {corpus}/parquet is left: notNull dropped 1, dedupe dropped 2, maxTokens dropped 101; "
        "loosen data.prepare",
    ),
    (
        "empty validation split",
        {"limit": 1, "splitRatios": {"train": 0.9, "validation": 0.1, "test": 0}},
        "EmptySplit",
        "none of the 1 examples fell into the validation split, whose ratio is 0.1: prepare more examples or raise "
        "data.prepare.splitRatios.validation",
    ),
]


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_wrong_data(ask: Asker, changes: dict[str, Any], reason: str, sentence: str) -> None:
    (ask.corpus / "empty").mkdir(exist_ok=True)
    with pytest.raises(outcome.PodFailure) as failed:
        ask(**_filled(changes, ask.corpus))
    code, message = outcome.describe(failed.value)
    expected = sentence.replace("{corpus}", str(ask.corpus))
    assert message.error is not None
    said = message.error.message
    # What Spark has to say about a row comes behind the colon.
    said = said[: len(expected)] if expected.endswith(": ") else said
    assert (code, failed.value.reason, said) == (EXIT_DATA, reason, expected)
    assert not ask.output.exists()


def test_an_output_that_is_something_else_is_left_alone(ask: Asker, corpus: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    said = CommitProperties(custom_metadata={"userMetadata": '{"job": "a job of theirs"}'})
    write_deltalake(theirs, pa.table({"a": [1]}), commit_properties=said)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/_SUCCESS").write_text("")
    told = {}
    for name in ("theirs", "files"):
        with pytest.raises(outcome.DataError) as failed:
            ask(output=str(tmp_path / name))
        assert failed.value.reason == "OutputTaken"
        told[name] = failed.value.message.replace(str(tmp_path), "")
    assert told == {
        "theirs": "data.prepare.output /theirs is a Delta table that no preparation wrote: name another folder",
        "files": "data.prepare.output /files has files and is not a Delta table: name another folder, or empty it",
    }
    assert (DeltaTable(theirs).version(), [*(tmp_path / "files").iterdir()]) == (
        0,
        [tmp_path / "files/_SUCCESS"],
    )


def test_what_the_report_shows(ask: Asker) -> None:
    made = ask(**STEPS | {"limit": None, "reportSamples": 2})
    (shown,) = ask.shown
    assert (shown.title, shown.source, shown.output) == (
        "default/job",
        str(ask.corpus / "parquet"),
        str(ask.output),
    )
    assert (shown.examples, shown.dropped, shown.rows) == (104, made.dropped, made.rows.to_json())
    before, after = shown.lengths
    assert (sum(before), sum(after)) == (sum(after) + made.dropped["maxTokens"], sum(shown.rows.values()))
    assert shown.clusters is None
    assert {step: len(texts) for step, texts in shown.samples.items()} == {
        "notNull": 1,
        "minQuality": 2,
        "dedupe": 1,
        "maxTokens": 1,
    }
    assert shown.samples["notNull"] == ["What is in table 61?\n "]
    assert shown.samples["maxTokens"][0].startswith(
        "Q: What is in table 62?\nA:\n the answer is in the table,"
    )


def test_a_report_of_near_duplicates(ask: Asker) -> None:
    made = ask(**STEPS | {"dedupe": {"near": {"threshold": 0.3}}})
    (shown,) = ask.shown
    assert (made.dropped["near"], shown.clusters) == (1, {2: 1})
    (pair,) = shown.samples["near"]
    assert [text.split("\n")[0] for text in pair.split("\n\nlike:\n")] == ["what is in table 62?"] * 2


def test_a_report_without_samples(ask: Asker) -> None:
    ask(**STEPS | {"reportSamples": 0, "dedupe": {"near": {"threshold": 0.3}}})
    assert ask.shown[0].samples == {}


def test_a_corpus_of_which_nothing_is_left_has_a_report(ask: Asker) -> None:
    with pytest.raises(outcome.DataError):
        ask(minQuality=2)
    assert (ask.shown[0].dropped["minQuality"], len(ask.shown[0].samples["minQuality"])) == (103, 3)


def test_what_a_killed_pod_left_is_no_hindrance(ask: Asker) -> None:
    ask.output.mkdir()
    (ask.output / "part-00000-0123-c000.snappy.parquet").write_bytes(b"half")
    (ask.output / "_delta_log").mkdir()
    assert ask(**STEPS).version == 0


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
        with pytest.raises(outcome.DataError) as failed:
            ask(source={"type": "Parquet", "path": "s3://closed/corpus"})
    assert (failed.value.reason, failed.value.message) == (
        "AccessDenied",
        "s3://closed/corpus is closed to the pod's credentials: grant them access, or correct them",
    )


def _filled(value: Any, corpus: Path) -> Any:
    if isinstance(value, dict):
        return {name: _filled(inner, corpus) for name, inner in value.items()}
    if isinstance(value, str):
        return value.replace("{corpus}", str(corpus)).replace("{{", "{").replace("}}", "}")
    return value


def test_the_tokenizer_comes_from_the_claim_of_the_recipe(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Cache | None] = []

    def fetched(*_: Any, cache: Cache | None, **__: Any) -> Path:
        used.append(cache)
        return tokenizer_folder

    monkeypatch.setattr("finetune_trainer.artifacts.fetch_tokenizer", fetched)
    asked = recipe(base="s3://bucket/base")
    model = asked.model.model_copy(update={"cache": ModelCache(claim_name="models")})
    with pipeline.fetched_tokenizer(asked.model_copy(update={"model": model})) as found:
        assert (found, used) == (tokenizer_folder, [Cache.of(model)])
    assert used != [None]
