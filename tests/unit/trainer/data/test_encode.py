"""Which documents become examples, and what is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.data import Columns
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.token_columns import Document
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data import encode

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPT_RESPONSE = Columns(type="PromptResponse", prompt="prompt", response="response")
PREFERENCE = Columns(type="Preference", prompt="prompt", chosen="chosen", rejected="rejected")


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def encoder(tokenizer: PreTrainedTokenizerBase, columns: Columns, **changes: Any) -> encode.Encoder:
    documents = Documents(tokenizer, columns, changes.pop("answers_only", True))
    settings: dict[str, Any] = {"max_length": 64, "truncation": "Drop"}
    return encode.Encoder(documents, **(settings | changes))


@pytest.mark.parametrize(
    ("truncation", "lengths", "counts"),
    [
        ("Drop", [5], {"read": 2, "kept": 1, "too long": 1}),
        ("Truncate", [8, 5], {"read": 2, "kept": 2, "truncated": 1, "tokens cut": 5}),
    ],
)
def test_what_becomes_of_examples_that_are_too_long_is_counted(
    tokenizer: PreTrainedTokenizerBase, truncation: str, lengths: list[int], counts: dict[str, int]
) -> None:
    texts = {"text": ["qqqqqqqqqqqq", "qqqq"]}
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, truncation=truncation)
    assert [len(example.tokens) for example in encoding.encode(texts)] == lengths
    assert dict(encoding.counts) == counts


def test_an_example_that_is_too_long_can_be_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, truncation="Fail")
    with pytest.raises(DataError, match=r"an example has 13 tokens, above training\.maxLength 8"):
        list(encoding.encode({"text": ["qqqqqqqqqqqq"]}))


@pytest.mark.parametrize(
    ("truncation", "lengths", "counts"),
    [
        ("Drop", [[6, 6]], {"read": 5, "kept": 1, "too long": 1}),
        ("Truncate", [[8, 6], [6, 6]], {"read": 5, "kept": 2, "truncated": 1, "tokens cut": 6}),
    ],
)
def test_a_pair_is_kept_or_left_out_as_a_whole(
    truncation: str, lengths: list[list[int]], counts: dict[str, int], tokenizer: PreTrainedTokenizerBase
) -> None:
    encoding = encoder(tokenizer, PREFERENCE, max_length=8, truncation=truncation)
    rows = {
        "prompt": ["qq"] * 5,
        "chosen": ["q" * 11, "jjj", "jjj", "", "jjj"],
        "rejected": ["jjj", "kkk", "jjj", "jjj", " "],
    }
    assert [example.lengths.tolist() for example in encoding.encode(rows)] == lengths
    assert dict(encoding.counts) == {**counts, "without a difference": 1, "without an answer": 2}


REMEDIES: dict[str, tuple[str, dict[str, list[str]], str]] = {
    "too long": (
        "Drop",
        {"prompt": ["qq"], "chosen": ["q" * 11], "rejected": ["jjj"]},
        "raise training.maxLength above 8",
    ),
    "truncated before they differ": (
        "Truncate",
        {"prompt": ["qqqqqqqq"], "chosen": ["j"], "rejected": ["k"]},
        "raise training.maxLength above 8",
    ),
    "without an answer": (
        "Drop",
        {"prompt": ["qq"], "chosen": [""], "rejected": ["jjj"]},
        "put answers into prompt, chosen, rejected of the rows",
    ),
    "without a difference": (
        "Drop",
        {"prompt": ["qq"], "chosen": ["jjj"], "rejected": ["jjj"]},
        "put different answers into chosen and rejected of the rows",
    ),
    "too long, and without a difference": (
        "Drop",
        {"prompt": ["qq"] * 2, "chosen": ["q" * 11, "jjj"], "rejected": ["jjj", "jjj"]},
        "raise training.maxLength above 8, and put different answers into chosen and rejected of the rows",
    ),
}


@pytest.mark.parametrize(("truncation", "rows", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_the_remedy_follows_from_why_rows_were_dropped(
    truncation: str, rows: dict[str, list[str]], remedy: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    encoding = encoder(tokenizer, PREFERENCE, max_length=8, truncation=truncation)
    assert list(encoding.encode(rows)) == []
    assert encoding.suggest_remedy() == remedy


def test_counts_are_metrics_too(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, truncation="Truncate")
    list(encoding.encode({"text": ["qqqqqqqqqqqq", "qqqq"]}))
    assert encoding.metrics("train") == {
        "train_rows_read": 2,
        "train_rows_kept": 2,
        "train_rows_too_long": 0,
        "train_rows_truncated": 1,
        "train_tokens_cut": 5,
        "train_rows_without_answer": 0,
        "train_rows_without_difference": 0,
    }
    assert encoding.summary() == "2 read, 1 truncated, 5 tokens cut, 2 kept"


def test_a_fingerprint_tells_examples_apart_by_all_that_they_are() -> None:
    examples = [
        encode.Encoded.of(Document([5, 6, 7], [False, True, True])),
        encode.Encoded.of(Document([5, 6, 7], [False, False, True])),
        encode.Encoded.of(Document([5, 6, 8], [False, True, True])),
        encode.Encoded.of(Document([5, 6], [False, True]), Document([7], [True])),
        encode.Encoded.of(Document([5, 6], [False, True]), Document([7], [True]), margin=0.5),
        encode.Encoded.of(Document([5, 6], [False, True]), Document([7], [True]), margin=1.5),
    ]
    assert len({example.fingerprint for example in examples}) == len(examples)
    assert {len(example.fingerprint) for example in examples} == {16}


HIDDEN = "the chat template renders the beginning of a conversation differently when the conversation continues, so "


def test_documents_without_a_target(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(type="Messages"))
    assert (
        list(
            encoding.select_examples(
                [(Document([], []),), (Document([1, 2], [True, False]),)], [None] * 2, [None] * 2
            )
        )
        == []
    )
    assert dict(encoding.counts) == {"read": 2, "without an answer": 2}
    with pytest.raises(DataError) as refused:
        list(encoding.select_examples([(Document([1, 2], None),)], [None], [None]))
    assert (refused.value.reason, refused.value.message) == (
        "ChatTemplate",
        f"{HIDDEN}answers cannot be separated from prompts: set objective.lossOn: LastAnswer or All, or set "
        f"model.chatTemplate to one with {{% generation %}} blocks",
    )
