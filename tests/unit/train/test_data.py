"""From tables and files to tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from finetune_crds.data import Columns, Data, Prepare, Splits
from finetune_trainer.outcome import DataError
from finetune_trainer.train import data

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPT_RESPONSE = Columns(prompt="prompt", response="response")
CHAT = (
    "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def encoder(tokenizer: PreTrainedTokenizerBase, columns: Columns, **changes: Any) -> data.Encoder:
    settings: dict[str, Any] = {"loss_on_answer": True, "max_length": 64, "overlong": "Drop"}
    return data.Encoder(tokenizer=tokenizer, columns=columns, **(settings | changes))


def learned_text(tokenizer: PreTrainedTokenizerBase, example: data.Encoded) -> str:
    """The part of an example on which the loss is taken."""
    chosen = [token for token, learned in zip(example.tokens, example.learned, strict=True) if learned]
    return str(tokenizer.decode(chosen))


def test_loss_is_taken_on_the_answer_and_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What is the red house? "], "response": ["The house is red."]}
    (example,) = encoder(tokenizer, PROMPT_RESPONSE).encode(rows)
    assert tokenizer.decode(example.tokens) == "What is the red house? The house is red.<eos>"
    assert learned_text(tokenizer, example) == "The house is red.<eos>"


def test_loss_can_be_taken_on_everything(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What? "], "response": ["That."]}
    (example,) = encoder(tokenizer, PROMPT_RESPONSE, loss_on_answer=False).encode(rows)
    assert learned_text(tokenizer, example) == "What? That.<eos>"


def test_a_text_is_learned_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = encoder(tokenizer, Columns(text="body")).encode({"body": ["The river is old."]})
    assert learned_text(tokenizer, example) == "The river is old.<eos>"


def test_loss_is_taken_on_what_the_assistant_says(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    messages = [
        {"role": "user", "content": "a house"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "a river"},
        {"role": "assistant", "content": "blue"},
    ]
    (example,) = encoder(tokenizer, Columns(messages="messages")).encode({"messages": [messages]})
    assert tokenizer.decode(example.tokens) == (
        "user\na house\nassistant\nred\nuser\na river\nassistant\nblue\n"
    )
    assert learned_text(tokenizer, example) == "red\nblue\n"


def test_a_conversation_that_the_template_refuses_is_bad_data(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="does not take a conversation of the data: roles must alternate"):
        list(encoder(tokenizer, Columns(messages="messages")).encode({"messages": [messages]}))


@pytest.mark.parametrize(
    ("overlong", "kept", "counts"),
    [
        ("Drop", [5], {"read": 2, "kept": 1, "too long": 1}),
        ("Truncate", [8, 5], {"read": 2, "kept": 2, "truncated": 1}),
    ],
)
def test_what_becomes_of_overlong_examples_is_counted(
    tokenizer: PreTrainedTokenizerBase, overlong: str, kept: list[int], counts: dict[str, int]
) -> None:
    texts = {"text": ["qqqqqqqqqqqq", "qqqq"]}
    encoding = encoder(tokenizer, Columns(text="text"), max_length=8, overlong=overlong)
    assert [len(example.tokens) for example in encoding.encode(texts)] == kept
    assert dict(encoding.counts) == counts


def test_an_overlong_example_can_be_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(text="text"), max_length=8, overlong="Fail")
    with pytest.raises(DataError, match=r"an example has 13 tokens, above training\.maxLength 8"):
        list(encoding.encode({"text": ["qqqqqqqqqqqq"]}))


PREPARED = Prepare(output="/splits")
TEMPLATED = Prepare(output="/splits", prompt_template="{a}")
BOTH_TEMPLATES = Prepare(output="/splits", prompt_template="{a}", response_template="{b}")


@pytest.mark.parametrize(
    ("columns", "prepare", "expected"),
    [
        (Columns(text="body"), None, Columns(text="body")),
        (Columns(text="body"), PREPARED, Columns(text="text")),
        (Columns(prompt="q", response="a"), PREPARED, PROMPT_RESPONSE),
        (Columns(messages="chat"), PREPARED, Columns(messages="messages")),
        (Columns(text="body"), TEMPLATED, Columns(text="text")),
        (Columns(prompt="q", response="a"), TEMPLATED, Columns(text="text")),
        (Columns(text="body"), BOTH_TEMPLATES, PROMPT_RESPONSE),
    ],
)
def test_a_prepared_table_has_columns_of_its_own_making(
    columns: Columns, prepare: Prepare | None, expected: Columns
) -> None:
    assert data.example_columns(Data(columns=columns, prepare=prepare)) == expected


def tokenized(splits: Splits, tokenizer: PreTrainedTokenizerBase, name: str = "train") -> data.Split | None:
    return data.tokenize(splits, name, encoder(tokenizer, PROMPT_RESPONSE))


def test_a_delta_table_gives_its_splits(table: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    splits = Splits(format="Delta", path=str(table))
    sizes = {name: tokenized(splits, tokenizer, name) for name in ("train", "validation", "test")}
    assert {name: len(split) if split else 0 for name, split in sizes.items()} == {
        "train": 72,
        "validation": 8,
        "test": 0,
    }
    assert data.delta_version(splits) == 0


@pytest.mark.parametrize("kind", ["Parquet", "JSONLines"])
def test_files_give_the_same_examples_in_the_same_order(
    kind: Literal["Parquet", "JSONLines"], tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    rows = [row for row in DeltaTable(str(table)).to_pyarrow_table().to_pylist() if row["split"] == "train"]
    place = tmp_path / "train"
    place.mkdir()
    for part, begin in enumerate((40, 0)):
        some = rows[begin : begin + 40 if begin == 0 else None]
        if kind == "Parquet":
            import pyarrow as pa

            pq.write_table(pa.Table.from_pylist(some), place / f"{part}.parquet")
        else:
            (place / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))

    from_files = tokenized(Splits(format=kind, train=str(place)), tokenizer)
    from_table = tokenized(Splits(format="Delta", path=str(table)), tokenizer)
    assert from_files is not None
    assert from_table is not None
    for name in ("tokens", "learned", "offsets"):
        np.testing.assert_array_equal(getattr(from_files, name), getattr(from_table, name))


def test_a_split_comes_back_from_disk_as_it_was(
    tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    split = tokenized(Splits(format="Delta", path=str(table)), tokenizer)
    assert split is not None
    split.save(tmp_path)
    for name in ("tokens", "learned", "offsets"):
        np.testing.assert_array_equal(getattr(data.Split.load(tmp_path), name), getattr(split, name))


def test_bad_data_is_refused_in_a_sentence(
    tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    from deltalake import write_deltalake

    tables = {
        "nulls": [
            {"split": "train", "prompt": "a", "response": None},
            {"split": "train", "prompt": "", "response": ""},
        ],
        "other columns": [{"split": "train", "question": "a"}],
        "no split column": [{"prompt": "a", "response": "b"}],
        "numbers": [{"split": "train", "prompt": "a", "response": 1}],
        "no training rows": [{"split": "test", "prompt": "a", "response": "b"}],
        "all too long": [{"split": "train", "prompt": "a" * 200, "response": "b"}],
    }
    import pyarrow as pa

    for name, rows in tables.items():
        write_deltalake(str(tmp_path / name), pa.Table.from_pylist(rows))

    def sentence(splits: Splits) -> str:
        with pytest.raises(DataError) as refused:
            tokenized(splits, tokenizer)
        return f"{refused.value.reason}: {refused.value.message}".replace(str(tmp_path), "")

    found = {
        name: sentence(Splits(format="Delta", path=str(tmp_path / name))) for name in (*tables, "nowhere")
    }
    assert found == {
        "nulls": "NullValue: column response has rows without a value in the split train of /nulls: filter them out",
        "other columns": "MissingColumn: the Delta table /other columns has no column prompt, response: "
        "it has question, split",
        "no split column": "MissingColumn: the Delta table /no split column has no column split: "
        "it has prompt, response",
        "numbers": "ColumnType: column response of the Delta table /numbers holds int64: examples are text, or "
        "lists of {role, content}",
        "no training rows": "EmptySplit: /no training rows has no rows of the split train: "
        "look at how the splits were made",
        "all too long": "EmptySplit: no example of the split train in /all too long is left "
        "(1 read, 1 too long): raise training.maxLength above 64, or look at the data",
        "nowhere": "MissingTable: data.splits.path /nowhere is no Delta table: correct the path",
    }
    missing_version = sentence(Splits(format="Delta", path=str(table), version=7)).replace(str(table), "T")
    assert missing_version == "MissingVersion: the Delta table T has no version 7: name one that it has"
    missing_file = sentence(Splits(format="Parquet", train=str(tmp_path / "gone")))
    assert missing_file == "MissingFile: /gone does not exist: mount the volume or correct data.splits"
