"""Token ids of examples are those that training makes."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as sf

from finetune_crds.data import Columns, Splits
from finetune_crds.objective import Objective
from finetune_crds.training import Model
from finetune_trainer.examples import tokenizer as tokenizers
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.tokenizer import Loaded, load_tokenizer
from finetune_trainer.prep.steps import tokens
from finetune_trainer.train.data import dataset, read
from finetune_trainer.train.data.encode import Encoder

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from unit.trainer.prep.recipes import Preparer

LONG = "the answer to the question is in the table, " * 5
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}]
MODEL = Model(base="/model")
TURNS_TYPE = "array<struct<role string, content string>>"
FORMS: dict[str, tuple[Columns, str, list[tuple[Any, ...]]]] = {
    "text": (
        Columns(type="Text"),
        "text string",
        [(text,) for text in ("the answer", "", "ends itself</s>", LONG, "ünïcödé 漢字 🙂")],
    ),
    "prompt and response": (
        Columns(type="PromptResponse"),
        "prompt string, response string",
        [("the question", "the answer"), (LONG, LONG), ("", "")],
    ),
    "preference": (
        Columns(type="Preference"),
        "prompt string, chosen string, rejected string",
        [("the question", "the answer", "no"), (LONG, LONG, "the")],
    ),
    "messages": (
        Columns(type="Messages"),
        f"messages {TURNS_TYPE}",
        [(TURNS,), ([{"role": "assistant", "content": ""}],)],
    ),
}


@pytest.mark.parametrize(("columns", "schema", "rows"), FORMS.values(), ids=FORMS)
def test_token_ids_beside_the_rows(
    columns: Columns, schema: str, rows: list[tuple[Any, ...]], spark: SparkSession, tokenizer_folder: Path
) -> None:
    numbered = [(number, *row) for number, row in enumerate(rows)]
    frame = spark.createDataFrame(numbered, f"id int, {schema}").repartition(2)
    tokenized = tokens.with_tokens(frame, MODEL, Loaded.of(MODEL, tokenizer_folder), columns, Objective())
    documents = Documents(load_tokenizer(MODEL, tokenizer_folder), columns, answers_only=True)
    expected = documents.of({name: [row[at] for row in rows] for at, name in enumerate(columns.column_names)})
    prefixes = ("chosen_", "rejected_") if columns.chosen else ("",)
    tokenized_rows = tokenized.orderBy("id").collect()
    assert [row["tokens"] for row in tokenized_rows] == [
        sum(len(row[f"{prefix}input_ids"]) for prefix in prefixes) for row in tokenized_rows
    ]
    assert [
        tuple((row[f"{prefix}input_ids"], row[f"{prefix}loss_mask"]) for prefix in prefixes)
        for row in tokenized_rows
    ] == list(expected)


def test_training_reads_the_token_ids_of_the_table(
    prepare_and_commit: Preparer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": f"the question {number}? ", "answer": "the answer " * (1 + number % 5)}
        for number in range(40)
    ]
    result = prepare_and_commit(rows)
    splits = Splits(type="Delta", path=result.path, version=result.version)
    tokenizer = load_tokenizer(MODEL, tokenizer_folder)
    documents = Documents(tokenizer, Columns(type="PromptResponse"), answers_only=True)
    other_documents = Documents(tokenizer, Columns(type="PromptResponse"), answers_only=False)
    assert [read.has_token_ids(splits, each.encoding) for each in (documents, other_documents)] == [
        True,
        False,
    ]
    arrays = []
    for prepared in (True, False):
        encoder = Encoder(documents, max_length=40, truncation="Truncate")
        dataset.tokenize(splits, "train", encoder, tmp_path / str(prepared), prepared=prepared)
        split = dataset.Split.load(tmp_path / str(prepared))
        arrays.append(
            [
                encoder.counts,
                split.digest,
                *(part.tolist() for part in (split.tokens, split.loss_mask, split.offsets)),
            ]
        )
    assert arrays[0] == arrays[1]

    # Whoever changes a text leaves the token ids of the old one.
    DeltaTable(result.path).update(predicate="tokens > 0", new_values={"response": "'another answer'"})
    assert not read.has_token_ids(Splits(type="Delta", path=result.path), documents.encoding)
    assert read.has_token_ids(splits, documents.encoding)


def test_rows_that_a_template_refused_have_no_tokens(spark: SparkSession, tokenizer_folder: Path) -> None:
    frame = spark.createDataFrame([("a", "b"), (None, "b")], "prompt string, response string")
    columns = Columns(type="PromptResponse")
    tokenized = tokens.with_tokens(
        frame.coalesce(1),
        MODEL,
        Loaded.of(MODEL, tokenizer_folder),
        columns,
        Objective(),
        on_template_error="Drop",
    )
    names = ("tokens", "input_ids", "loss_mask")
    nulls = tokenized.select(*(sf.col(name).isNull() for name in names)).collect()
    assert [tuple(row) for row in nulls] == [(False,) * 3, (True,) * 3]


def test_executors_in_other_pods_get_the_tokenizer(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "master", "k8s://https://kubernetes.default.svc")
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    frame = spark.createDataFrame([(TURNS * 2,)], f"messages {TURNS_TYPE}")
    columns, loaded = Columns(type="Messages"), Loaded.of(MODEL, folder)
    tokenized = tokens.with_tokens(frame, MODEL, loaded, columns, Objective(loss_on="LastAnswer"))
    shutil.rmtree(folder)
    documents = Documents(load_tokenizer(MODEL, tokenizer_folder), columns, True, last_only=True)
    ((document,),) = documents.of({"messages": [TURNS * 2]})
    assert document != next(replace(documents, last_only=False).of({"messages": [TURNS * 2]}))[0]
    assert [(row["input_ids"], row["loss_mask"]) for row in tokenized.collect()] == [document]


def test_workers_tokenize_texts_without_transformers(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(MODEL, tokenizer_folder)
    load = tokenizers.build_text_tokenizer_loader(tokenizer)
    assert load is not None
    columns = Columns(type="PromptResponse")
    script = (
        "import json, pickle, sys; from finetune_trainer.examples.documents import Documents; from finetune_trainer.prep.steps import tokens; "
        "load, columns = pickle.loads(sys.stdin.buffer.read()); "
        "found = [*Documents(load(), columns, True).of(json.loads(sys.argv[1]))]; "
        "print(json.dumps([found, 'transformers' in sys.modules]))"
    )
    examples = {"prompt": ["the question", LONG, ""], "response": ["the answer", LONG, "ends itself</s>"]}
    worker = subprocess.run(
        [sys.executable, "-c", script, json.dumps(examples)],
        input=pickle.dumps((load, columns)),
        capture_output=True,
        check=True,
    )
    expected = [*Documents(tokenizer, columns, answers_only=True).of(examples)]
    assert json.loads(worker.stdout) == json.loads(json.dumps([expected, False]))


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_texts_are_those_of_the_tokenizer(
    tokenizer_folder: Path, tmp_path: Path, *, split: bool
) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": split}))
    tokenizer = load_tokenizer(MODEL, folder)
    load = tokenizers.build_text_tokenizer_loader(tokenizer)
    assert load is not None
    text = "the </s> answer"
    expected = [*tokenizer([text])["input_ids"][0], tokenizer.eos_token_id]
    for used in (load(), load_tokenizer(MODEL, folder)):
        ((document,),) = Documents(used, Columns(type="Text"), answers_only=True).of({"text": [text]})
        assert document.tokens == expected
