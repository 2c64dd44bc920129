"""Token counts are the lengths that training sees."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.data import COLUMNS_OF, Columns
from finetune_crds.training import Model
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.prep import tokens
from finetune_trainer.tokenizer import load_tokenizer
from finetune_trainer.train.data.encode import Encoder

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

LONG = "the answer to the question is in the table, " * 5
EXAMPLES: list[tuple[str, dict[str, list[Any]]]] = [
    ("text", {"text": ["the answer", "", "ends itself</s>", LONG, "ünïcödé 漢字 🙂"]}),
    ("prompt and response", {"prompt": ["the question", LONG, ""], "response": ["the answer", LONG, ""]}),
    (
        "messages",
        {
            "messages": [
                [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}],
                [{"role": "assistant", "content": ""}],
            ]
        },
    ),
]


KINDS = {frozenset(fields): kind for kind, fields in COLUMNS_OF.items()}


@pytest.mark.parametrize("examples", [row[1] for row in EXAMPLES], ids=[row[0] for row in EXAMPLES])
def test_counts_are_the_trainers(examples: dict[str, list[Any]], tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(Model(base=str(tokenizer_folder)), tokenizer_folder)
    encoder = Encoder(
        tokenizer,
        Columns.model_validate({"type": KINDS[frozenset(examples)]}),
        loss_on_answer=False,
        max_length=10_000,
        overlong="Fail",
    )
    assert tokens.count(tokenizer, examples) == [len(example.tokens) for example in encoder.encode(examples)]


def test_a_preference_counts_with_either_answer(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(Model(base=str(tokenizer_folder)), tokenizer_folder)
    prompt, chosen, rejected = ["the question", LONG, ""], ["the answer", "", LONG], ["no", LONG, ""]
    either = [
        tokens.count(tokenizer, {"prompt": prompt, "response": answers}) for answers in (chosen, rejected)
    ]
    both = tokens.count(tokenizer, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert both == [one + other for one, other in zip(*either, strict=True)]


def test_counts_beside_the_rows(spark: SparkSession, tokenizer_folder: Path) -> None:
    rows = [("a", "the table", "the answer"), ("b", LONG, "no"), ("c", "", "")]
    frame = spark.createDataFrame(rows, "id string, prompt string, response string").repartition(2)
    model = Model(base=str(tokenizer_folder))
    made = tokens.with_tokens(frame, model, tokenizer_folder, ("prompt", "response")).orderBy("id")
    tokenizer = load_tokenizer(model, tokenizer_folder)
    wanted = [
        (id_, prompt, response, len(tokenizer(prompt)["input_ids"]) + len(tokenizer.tokenize(response)) + 1)
        for id_, prompt, response in rows
    ]
    assert [tuple(row) for row in made.collect()] == wanted


def test_executors_in_other_pods_get_the_tokenizer(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "master", "k8s://https://kubernetes.default.svc")
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "the table"}]
    frame = spark.createDataFrame([(turns,)], "messages array<struct<role string, content string>>")
    counted = tokens.with_tokens(frame, Model(base="/model"), folder, ("messages",))
    shutil.rmtree(folder)
    tokenizer = load_tokenizer(Model(base="/model"), tokenizer_folder)
    assert [row["tokens"] for row in counted.collect()] == tokens.count(tokenizer, {"messages": [turns]})


def test_workers_count_texts_without_transformers(tokenizer_folder: Path) -> None:
    load = tokens.plain(Model(base="/model"), tokenizer_folder)
    assert load is not None
    script = (
        "import json, pickle, sys; from finetune_trainer.prep import tokens; load = pickle.loads(sys.stdin.buffer.read()); "
        "counts = tokens.count(load(), json.loads(sys.argv[1])); print(json.dumps([counts, 'transformers' in sys.modules]))"
    )
    examples = {"prompt": ["the question", LONG, ""], "response": ["the answer", LONG, "ends itself</s>"]}
    worker = subprocess.run(
        [sys.executable, "-c", script, json.dumps(examples)],
        input=pickle.dumps(load),
        capture_output=True,
        check=True,
    )
    tokenizer = load_tokenizer(Model(base="/model"), tokenizer_folder)
    assert json.loads(worker.stdout) == [tokens.count(tokenizer, examples), False]


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_in_texts_count_as_training_counts_them(
    tokenizer_folder: Path, tmp_path: Path, *, split: bool
) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": split}))
    load = tokens.plain(Model(base="/model"), folder)
    assert load is not None
    text = "the </s> answer"
    wanted = len(load_tokenizer(Model(base="/model"), folder)([text])["input_ids"][0]) + 1
    assert tokens.count(load(), {"text": [text]}) == [wanted]


def test_more_texts_than_are_encoded_at_once(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(Model(base="/model"), tokenizer_folder)
    texts = ["the " * (number % 7) for number in range(600)]
    assert tokens.count(tokenizer, {"text": texts}) == [
        tokens.count(tokenizer, {"text": [text]})[0] for text in texts
    ]


def test_tokenizers_that_cannot_be_used(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = Model(base="/models/base")
    with pytest.raises(
        RecipeRefusedError, match=r"^the tokenizer of model\.base /models/base cannot be loaded: "
    ):
        load_tokenizer(model, tmp_path)
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    with pytest.raises(RecipeRefusedError) as refused:
        load_tokenizer(model, tmp_path)
    assert refused.value.message == (
        "the tokenizer of model.base /models/base has no end-of-text token: set eos_token in its tokenizer_config.json"
    )
