"""The base model script: a tokenizer that loses nothing, and a model that transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.scripts import base_model, corpus

ROWS = [
    corpus.Row(
        f"m.f{i}", "m", f"What does m.f{i} do?", f"Return the number {i} of things.", 1.0, "function", "class"
    )
    for i in range(200)
]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """A small corpus, written and read."""
    corpus.write([*ROWS, *ROWS[:50]], str(tmp_path / "corpus"))
    return base_model.read_texts(str(tmp_path / "corpus"))


def test_texts_are_distinct(texts: list[str]) -> None:
    assert texts == [row.answer for row in ROWS]


def test_tokenizer_gives_back_any_text(texts: list[str]) -> None:
    tokenizer = base_model.train_tokenizer(texts)
    text = "naïve → 数\n\t{x}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")


def test_chat_template_reads_as_the_quickstart_does(texts: list[str]) -> None:
    tokenizer = base_model.train_tokenizer(texts)
    turns = [{"role": "user", "content": "What is x for?"}, {"role": "assistant", "content": "For y."}]
    assert (
        tokenizer.apply_chat_template(turns, tokenize=False)
        == "Question: What is x for?\nAnswer: For y.</s>\n"
    )
    assert (
        tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        == "Question: What is x for?\nAnswer:"
    )


def test_saved_model_loads_and_has_learned(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {}
    for steps in (0, 10):
        folder = tmp_path / str(steps)
        assert base_model.main([str(tmp_path / "corpus"), str(folder), "--steps", str(steps)]) == 0
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer(texts[0], return_tensors="pt")["input_ids"]
        losses[steps] = model(input_ids=ids, labels=ids).loss.item()
    assert losses[10] < losses[0] - 1
    assert "saved to" in capsys.readouterr().out
