"""The preparation from source to table: what is written, found again and counted."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from finetune_crds.contract import PrepResult
from finetune_crds.data import Columns
from finetune_crds.reference import SAMPLES
from finetune_crds.training import ModelCache
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod import exit_status
from finetune_trainer.prep import output, pipeline
from fixtures.fake_hub import Repository, running
from unit.trainer.prep.corpus import DIRTY, DROPPED, ROWS, STEPS, counted
from unit.trainer.prep.recipes import PAIR_TOKENS, prepare_quickly, prepared, recipe, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from unit.trainer.prep.corpus import Asker


def test_the_table_holds_what_the_result_says(ask: Asker, corpus: Path, tmp_path: Path) -> None:
    results, tables = [], []
    sources = [("Parquet", "parquet", None), ("JSONLines", "lines.jsonl", None), ("Delta", "delta", 0)]
    for kind, name, version in sources:
        source = {"type": kind, "path": str(corpus / name), "version": version}
        # Once with the counts of Spark.
        ask.run = prepared if kind == "Delta" else prepare_quickly
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
    expected = {(f"Q: {row['question']}\nA:", f" {row['answer']}") for row in ROWS + DIRTY}
    assert {(row["prompt"], row["response"]) for row in tables[0]} <= expected
    assert len({row["id"] for row in tables[0]}) == 70


def test_near_duplicates_are_removed_and_counted(
    ask: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {
        "question": "What is in the old table beside the window of the hall?",
        "answer": "An answer of more words",
    }
    copies = [{"question": long["question"], "answer": f"{long['answer']} {end}"} for end in ("than", "then")]
    pq.write_table(pa.Table.from_pylist([long, *copies, *ROWS[:5]]), tmp_path / "corpus.parquet")
    source = {"type": "Parquet", "path": str(tmp_path / "corpus.parquet")}
    result = ask(
        source=source,
        dedupe={"near": {}},
        splitRatios={"train": 1, "validation": 0, "test": 0},
        reportSamples=3,
    )
    assert result.dropped == {"notNull": 0, "dedupe": 0, "near": 2}
    assert len(table_of(result)) == result.rows.train == 6
    assert (
        "near duplicates: 3 examples, of which 1 stays; the largest cluster has 3\n"
        in capsys.readouterr().out
    )
    (shown,) = ask.shown
    assert shown.clusters == {3: 1}
    assert (result.warnings, shown.warnings) == (None, [])
    assert [pair.similarity for pair in shown.pairs] == [0.9333, 0.9333]  # 14 of 15 runs of three words
    pairs = [re.split(r"\n\nlike \(0\.\d\d\):\n", pair) for pair in shown.samples["near"]]
    question = long["question"].lower()
    assert [[text.split("\n")[0].lower() for text in pair] for pair in pairs] == [[question] * 2] * 2


def test_a_pod_that_is_tried_again_finds_its_version(
    ask_and_commit: Asker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pod also meets what a killed one left before its commit."""
    ask = ask_and_commit
    (ask.output / "_delta_log").mkdir(parents=True)
    (ask.output / "part-00000-0123-c000.snappy.parquet").write_bytes(b"half")
    first = ask(uid="one", **STEPS)
    capsys.readouterr()
    assert ask(uid="one", **STEPS) == first
    log = capsys.readouterr().out
    assert f"{ask.output} version 0 was already written by this job: skipping the preparation\n" in log
    # A pod that looked before the commit prepares the rows, and writes nothing.
    with monkeypatch.context() as patch:
        versions, looks = output.list_versions, itertools.count()
        patch.setattr(output, "list_versions", lambda *where: [] if next(looks) == 0 else versions(*where))
        assert ask(uid="one", **STEPS) == first
    assert DeltaTable(ask.output).version() == 0
    other_recipe = ask(uid="one", **STEPS | {"limit": 50})
    assert [result.version for result in (first, other_recipe)] == [0, 1]
    table = DeltaTable(ask.output)
    assert table.version() == 1
    # Readers without a JVM need tables without deletion vectors.
    assert table.metadata().configuration.get("delta.enableDeletionVectors") == "false"
    assert len(table.file_uris()) == 1


def test_two_pods_at_once_write_one_version(ask_and_commit: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prepare, and commit at the same moment; Delta may refuse one of them, which is then tried again."""
    ask = ask_and_commit
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
    committed_result = ask(**STEPS)
    committed = [result for result in results if isinstance(result, PrepResult)]
    assert committed in ([committed_result], [committed_result, committed_result])
    assert DeltaTable(ask.output).version() == committed_result.version == 0


def test_columns_are_found_in_the_schema(
    ask_and_commit: Asker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ask_and_commit
    turn = pa.struct([("content", pa.string()), ("role", pa.string()), ("weight", pa.int64())])
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    row = {"messages": chats, "prompt": "hi", "prompt_id": 1}
    fields = [("messages", pa.list_(turn)), ("prompt", pa.string()), ("prompt_id", pa.int64())]
    pq.write_table(pa.Table.from_pylist([row], pa.schema(fields)), tmp_path / "chats.parquet")
    only_train = {"train": 1, "validation": 0, "test": 0}
    source = {"type": "Parquet", "path": str(tmp_path / "chats.parquet")}
    result = ask(source=source, columns=None, splitRatios=only_train)
    assert result.columns == Columns(type="Messages", messages="messages")
    assert "columns messages\n" in capsys.readouterr().out
    (table_row,) = table_of(result)
    assert (list(table_row), table_row["messages"]) == (
        ["id", "messages", "input_ids", "loss_mask", "tokens", "split"],
        [chat | {"weight": None} for chat in chats],
    )
    # A pod that is tried again still knows.
    assert ask(source=source, columns=None, splitRatios=only_train) == result


def test_the_sample_reads_squad_from_the_hub(
    ask_and_commit: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of SQuAD are a structure of lists, of which the template takes the first text."""
    sample = yaml.safe_load((SAMPLES / "nemo-recipe.yaml").read_text(encoding="utf-8"))["spec"]
    answers = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int32()))])
    schema = pa.schema(
        [*((name, pa.string()) for name in ("id", "title", "context", "question")), ("answers", answers)]
    )
    places = ("Normandy", "Oxygen", "Warsaw")
    rows = [
        {
            "id": place,
            "title": place,
            "context": f"{place} is one.",
            "question": "Which is one?",
            "answers": {"text": [place, "that"], "answer_start": [0, 0]},
        }
        for place in places
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), file)
    repository = Repository({"plain_text/train-00000-of-00001.parquet": file.getvalue(), "README.md": b""})
    of_sample = {name: value for name, value in sample["data"]["prepare"].items() if name != "output"}
    with running(monkeypatch, tmp_path / "cache", {"rajpurkar/squad": repository}):
        result = ask_and_commit(
            source=sample["data"]["source"],
            columns=sample["data"]["columns"],
            objective=sample["objective"],
            **of_sample | {"splitRatios": {"train": 1, "validation": 0, "test": 0}},
        )
    texts = {(row["prompt"], row["response"]) for row in table_of(result)}
    assert texts == {
        (f"Context: {place} is one.\nQuestion: Which is one?\nAnswer:", f" {place}") for place in places
    }


def test_preferences_come_through_every_step(ask_and_commit: Asker, tmp_path: Path) -> None:
    ask = ask_and_commit
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
    table = table_of(result)
    assert result.dropped == {"notNull": 3, "dedupe": 1, "maxTokens": 1, "limit": 6}
    assert (result.to_json()["rows"], result.to_json()["tokens"]) == tuple(counted(table).values())
    assert list(table[0]) == ["id", "prompt", "chosen", "rejected", *PAIR_TOKENS, "tokens", "split"]
    expected = {(f"Q: {row['ask']}\nA:", row["good"], row["bad"]) for row in [*rows, *dirty[:2]]}
    assert {(row["prompt"], row["chosen"], row["rejected"]) for row in table} <= expected
    assert len(table) == 25


def test_what_the_report_shows(ask: Asker) -> None:
    result = ask(**STEPS | {"limit": None, "reportSamples": 2})
    (shown,) = ask.shown
    assert (shown.title, shown.source, shown.output) == (
        "default/job",
        str(ask.corpus / "parquet"),
        str(ask.output),
    )
    assert (shown.examples, shown.dropped, shown.rows) == (104, result.dropped, result.rows.to_json())
    before, after = shown.lengths
    assert (sum(before), sum(after)) == (sum(after) + result.dropped["maxTokens"], sum(shown.rows.values()))
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


def test_a_corpus_of_which_nothing_is_left_has_a_report(ask: Asker) -> None:
    with pytest.raises(exit_status.DataError):
        ask(minQuality=2, reportSamples=3)
    assert (ask.shown[0].dropped["minQuality"], len(ask.shown[0].samples["minQuality"])) == (103, 3)


def test_the_tokenizer_comes_from_the_claim_of_the_recipe(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Cache | None] = []

    def fetched(*_: Any, cache: Cache | None, **__: Any) -> Path:
        used.append(cache)
        return tokenizer_folder

    monkeypatch.setattr("finetune_trainer.models.download.fetch_tokenizer", fetched)
    job_recipe = recipe(base="s3://bucket/base")
    model = job_recipe.model.model_copy(update={"cache": ModelCache(claim_name="models")})
    with pipeline.fetch_tokenizer(job_recipe.model_copy(update={"model": model})) as folder:
        assert (folder, used) == (tokenizer_folder, [Cache.of(model)])
    assert used != [None]
