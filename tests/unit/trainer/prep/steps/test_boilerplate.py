"""From which number of texts on a run of words is boilerplate, and which runs are, in a sample of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from finetune_trainer.prep.steps import boilerplate
from finetune_trainer.prep.steps.sketch import hash_shingles

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.parametrize(
    ("texts", "limit"),
    [(0, 2), (3, 2), (5, 2), (8, 4), (20, 10), (500, 10), (1_000, 20), (20_000, 400), (2_000_000, 40_000)],
)
def test_how_many_texts_may_share_a_run(texts: int, limit: int) -> None:
    assert boilerplate.limit(texts) == limit


def test_runs_of_many_texts_are_counted_once_a_text_in_a_sample(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        f"in all texts {'and again ' * 9} own{number} " + "in some texts" * (number % 4 == 0)
        for number in range(200)
    ]
    frame = spark.createDataFrame(
        [(f"{at}", text) for at, text in enumerate(texts)], "id string, text string"
    )
    shared = ["in all texts", "all texts and", "texts and again", "and again and", "again and again"]
    everywhere, often = (
        np.sort(np.concatenate([hash_shingles([run])[0] for run in runs]))
        for runs in (shared, [*shared, "in some texts"])
    )
    frequent = boilerplate.find_boilerplate(frame, "text", 200)
    assert frequent.shingles.tolist() == often.tolist()
    assert frequent.shingles[frequent.of_most].tolist() == everywhere.tolist()
    # About 5 of 40 texts have the other run.
    monkeypatch.setattr(boilerplate, "_SAMPLED_TEXTS", 30)
    assert boilerplate.find_boilerplate(frame, "text", 200).shingles.tolist() == everywhere.tolist()
    monkeypatch.setattr(boilerplate, "_MAX_SHINGLES", 2)
    assert len(boilerplate.find_boilerplate(frame, "text", 200).shingles) == 2
    assert boilerplate.find_boilerplate(frame, "text", 2).shingles.tolist() == []
