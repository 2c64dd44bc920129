"""The rows that the benchmark's contenders train on."""

from __future__ import annotations

import json
from pathlib import Path

from bench.trainer import machine, rows

PIECES = [f"Question: what is {word}?\nAnswer: {word} is {word}." for word in ("red", "blue", "green")]


def test_rows_are_as_long_as_alpacas_and_the_same_each_time() -> None:
    lengths = [40, 70, 90]
    made = rows.compose(PIECES, lengths, 200)
    assert made == rows.compose(PIECES, lengths, 200)
    assert len(made.texts) == 200
    assert all(rows.SHORTEST <= length <= rows.LONGEST for length in made.lengths)
    assert max(made.lengths) - min(made.lengths) > 150
    assert made.texts[0].count("Question") == len(made.texts[0].split("\nQuestion"))


def test_there_are_rows_for_all_packs() -> None:
    assert [rows.enough(packs) for packs in (1, 100, 1000)] == [1000, 1126, 11264]


def test_lengths_are_those_that_the_tokenizer_makes(tmp_path: Path) -> None:
    tokenizer = rows.train_tokenizer(PIECES)
    made = rows.make(tokenizer, PIECES, 20)
    assert made.lengths == [len(tokenizer.encode(text).ids) + 1 for text in made.texts]
    made.save(tmp_path / "rows.jsonl")
    saved = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in saved] == [{"text": text} for text in made.texts]


def test_the_distribution_says_what_padding_would_waste() -> None:
    texts = rows.Texts(["a", "b", "c"], [100, 200, 312])
    assert texts.distribution() == {
        "rows": 3,
        "tokens": 612,
        "mean": 204.0,
        "percentiles": {"0": 100, "10": 100, "50": 200, "90": 312, "100": 312},
        "maxLength": 2048,
        "usefulWhenPadded": 0.0996,
    }


def test_the_processor_is_named() -> None:
    assert machine.processor("processor : 0\nmodel name : Fast CPU\n") == "Fast CPU"
