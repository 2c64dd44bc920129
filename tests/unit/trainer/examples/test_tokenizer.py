"""Which tokenizers a model can be trained with."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.training import Model
from finetune_trainer.examples.tokenizer import (
    build_text_tokenizer_loader,
    check_same_vocabulary,
    check_vocabulary,
    describe_identity,
    encode,
    load_tokenizer,
    pad_id,
)
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


def tokenizer_of(words: list[str], **special: Any) -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are some words, numbered as they come."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])), **special
    )


@pytest.mark.parametrize(("special", "expected"), [({}, 0), ({"pad_token": "pad"}, 1)])
def test_rows_are_padded_with_the_end_of_text_where_there_is_no_padding(
    special: dict[str, str], expected: int, tmp_path: Path
) -> None:
    tokenizer_of(["end", "pad", "a"], eos_token="end", **special).save_pretrained(tmp_path)
    loaded = load_tokenizer(Model(base="tiny"), tmp_path)
    assert pad_id(loaded) == expected
    # What is exported stays as it was.
    assert (loaded.pad_token is None) is (expected == 0)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    tokenizer_of(["a", "b"]).save_pretrained(tmp_path)
    with pytest.raises(RecipeRefusedError) as refused:
        load_tokenizer(Model(base="tiny"), tmp_path)
    assert refused.value.message == (
        "the tokenizer of model.base tiny has no end-of-text token: set eos_token in its tokenizer_config.json"
    )


# transformers makes a tokenizer of nothing but special tokens for some kinds of models without the files of one.
@pytest.mark.parametrize("kind", [None, "llama", "qwen2", "bert", "t5"])
def test_a_model_without_a_tokenizer(kind: str | None, tmp_path: Path) -> None:
    if kind:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(DataError) as failed:
        load_tokenizer(Model(base="tiny"), tmp_path)
    assert (failed.value.exit_code, failed.value.reason, failed.value.message) == (
        65,
        "TokenizerNotFound",
        "model.base tiny has no tokenizer: add its tokenizer files, for example tokenizer.json and tokenizer_config.json, "
        "to the folder of its config.json, or choose another model",
    )


def test_a_damaged_tokenizer_is_there_and_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeRefusedError) as refused:
        load_tokenizer(Model(base="tiny"), tmp_path)
    assert (refused.value.exit_code, refused.value.reason) == (64, "TokenizerNotLoadable")
    assert refused.value.message.startswith("the tokenizer of model.base tiny cannot be loaded: ")


def test_a_tokenizer_with_tokens_that_the_embedding_lacks_is_refused() -> None:
    tokenizer = tokenizer_of(["end", "a", "b"])
    check_vocabulary(tokenizer, 3, "tiny")
    check_vocabulary(tokenizer, 64, "tiny")
    tokenizer.add_tokens(["c"])
    with pytest.raises(RecipeRefusedError) as refused:
        check_vocabulary(tokenizer, 3, "tiny")
    assert (refused.value.exit_code, refused.value.reason) == (64, "VocabularyMismatch")
    assert refused.value.message == (
        "the tokenizer of model.base tiny has token ids up to 3, but the embedding has only 3 rows: use the tokenizer "
        "that the model was trained with, or add rows to its embedding"
    )


def test_new_tokens_are_tokens_of_text_in_any_order(base_model: Path) -> None:
    plain = load_tokenizer(Model(base="tiny"), base_model)
    text = "What is <tool>the red house</tool>?"
    first, second = (
        load_tokenizer(Model(base="tiny", new_tokens=new), base_model)
        for new in (["<tool>", "</tool>"], ["</tool>", "<tool>"])
    )
    size = len(plain)
    ids = first(text)["input_ids"]
    assert first.convert_tokens_to_ids(["</tool>", "<tool>"]) == [size, size + 1]
    assert [each for each in ids if each >= size] == [size + 1, size]
    assert second(text)["input_ids"] == ids
    # The workers of a preparation have the same tokenizer, and its tokens are not those of another one.
    load = build_text_tokenizer_loader(first)
    assert load is not None
    assert list(encode(load(), [text], special=False)) == [ids]
    assert describe_identity(first) == describe_identity(second) != describe_identity(plain)
    assert first.decode(ids, skip_special_tokens=True) == text
    check_vocabulary(first, size, "tiny", [size, size + 1])
    with pytest.raises(RecipeRefusedError) as refused:
        load_tokenizer(Model(base="tiny", new_tokens=["<new>", "house", "<eos>"]), base_model)
    assert refused.value.message == (
        "model.newTokens <eos> already exists in the tokenizer of model.base tiny: remove it from model.newTokens"
    )


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        (["end", "a", "b"], None),
        (["end", "a", "b", "c"], None),
        (["end", "a"], None),
        (
            ["end", "b", "a"],
            "the tokenizers of model.base tiny and of the teacher big disagree on 2 tokens, first on 'a' with id 1 in "
            "tiny: choose a teacher of the same family",
        ),
        (
            ["end", "a", "x"],
            "the tokenizers of model.base tiny and of the teacher big disagree on 1 tokens, first on 'b' with id 2 in "
            "tiny: choose a teacher of the same family",
        ),
    ],
)
def test_a_teacher_means_the_same_tokens(teacher: list[str], sentence: str | None) -> None:
    def check() -> None:
        check_same_vocabulary(tokenizer_of(["end", "a", "b"]), tokenizer_of(teacher), "tiny", "big")

    if sentence is None:
        check()
        return
    with pytest.raises(RecipeRefusedError) as refused:
        check()
    assert refused.value.message == sentence


def test_a_tokenizer_that_cannot_be_loaded_is_refused(base_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base_model, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeRefusedError, match=r"the tokenizer of model\.base tiny cannot be loaded: "):
        load_tokenizer(Model(base="tiny"), folder)
