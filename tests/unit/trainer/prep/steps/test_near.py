"""Near duplicates: which examples are removed from a corpus whose rows say where they come from."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bench.prep.near_duplicates import Row, score
from bench.prep.near_duplicates import rows as labelled
from finetune_crds.prepare import NearDedupe
from finetune_trainer.prep.spark.counter import Counter
from finetune_trainer.prep.steps import near
from finetune_trainer.prep.steps.near import Clusters, Pair, Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = [
    f"{first}{last}" for first in ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti") for last in "bdfglmnprstvz"
]


def clusters(spark: SparkSession, rows: dict[str, str], partitions: int) -> tuple[set[str], Clusters]:
    """The ids that stay, and what was found."""
    frame = spark.createDataFrame([*rows.items()], f"id string, {near.TEXT} string").repartition(partitions)
    with ExitStack() as kept_frames:
        remaining, near_duplicates = near.remove_near_duplicates(frame, NearDedupe(), kept_frames)
        assert remaining.columns == ["id"]
        return {row["id"] for row in remaining.collect()}, near_duplicates


def instruction(number: int = 0) -> str:
    return " ".join(f"rule{number}x{at}" for at in range(200))


def own(number: int, words: int = 24) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=words))  # noqa: S311


# Texts of which each says something else, by what they share.
SHARED = {
    "one of three instructions": [f"{instruction(number % 3)} {own(number)}" for number in range(42)],
    "one of three instructions, each before a sixth": [
        f"{instruction(number % 6)} {own(number)}" if number % 6 < 3 else own(number, 60)
        for number in range(84)
    ],
    "an instruction": [f"{instruction()} {own(number)}" for number in range(40)],
    "an instruction before three words": [f"{instruction()} {own(number, 3)}" for number in range(40)],
    "an instruction, in a corpus of five": [f"{instruction()} {own(number)}" for number in range(5)],
    "no words": ["", "?", "!!", "..."],
}


@pytest.mark.parametrize("texts", SHARED.values(), ids=SHARED)
def test_what_many_examples_share_makes_no_duplicates(spark: SparkSession, texts: list[str]) -> None:
    rows = {f"{number:02}": text for number, text in enumerate(texts)}
    remaining, near_duplicates = clusters(spark, rows, 2)
    assert (sorted(remaining), near_duplicates.dropped) == (sorted(rows), 0)


@pytest.mark.parametrize(("copies", "texts"), [(12, 100), (12, 1_000), (60, 1_000)])
def test_copies_of_an_article_behind_headlines_are_removed(
    spark: SparkSession, copies: int, texts: int
) -> None:
    article = own(texts, 300)
    rows = {
        f"{number:03}": f"{own(number, 6)} {article}" if number < copies else own(number, 60)
        for number in range(texts)
    }
    remaining, near_duplicates = clusters(spark, rows, 2)
    assert (len(remaining), near_duplicates.sizes) == (texts - copies + 1, {copies: 1})
    assert min(pair.similarity for pair in near_duplicates.pairs) > 0.9


@pytest.fixture(scope="module")
def corpus() -> list[Row]:
    """Originals and copies of few edits, of which half share an instruction, a letter or a licence, and lists of numbers."""
    chance = random.Random(7)  # noqa: S311
    lists = [" ".join(str(chance.randint(0, 999)) for _ in range(80)) for _ in range(60)]
    return [*labelled(600), *(Row(f"{number:02}", text, f"{number:02}") for number, text in enumerate(lists))]


@pytest.fixture(scope="module")
def result(spark: SparkSession, corpus: list[Row]) -> tuple[set[str], Clusters]:
    """The ids of the corpus that stay, and the clusters, on four partitions."""
    return clusters(spark, {row.id: row.text for row in corpus}, 4)


def test_edited_copies_are_removed_and_texts_that_look_alike_stay(
    corpus: list[Row], result: tuple[set[str], Clusters]
) -> None:
    remaining, near_duplicates = result
    removed = {pair.removed for pair in near_duplicates.pairs}
    assert removed == {row.id for row in corpus} - remaining
    assert near_duplicates.dropped == len(removed)
    assert {pair.kept for pair in near_duplicates.pairs} <= remaining
    reached = score(corpus, ((pair.removed, pair.closest) for pair in near_duplicates.pairs))
    assert reached.precision >= 0.99
    assert reached.recall >= 0.95


@pytest.mark.parametrize("partitions", [1, 16])
def test_the_same_examples_stay_on_any_number_of_partitions(
    spark: SparkSession, corpus: list[Row], result: tuple[set[str], Clusters], partitions: int
) -> None:
    assert clusters(spark, {row.id: row.text for row in corpus}, partitions) == result


def test_the_least_id_of_a_cluster_stays(spark: SparkSession) -> None:
    text = " ".join(WORDS)
    rows = {"c": text, "a": f"{text} more", "b": f"some {text}", "d": "quite another text", "e": ""}
    # Of 102 runs of three words, the copies with one more word have one more.
    pairs = [Pair("b", "c", 0.9903, "a"), Pair("c", "a", 0.9903, "a")]
    assert clusters(spark, rows, 2) == ({"a", "d", "e"}, Clusters({3: 1}, {"": Source(5, 2)}, pairs))


def test_examples_that_meet_behind_another_are_compared(spark: SparkSession) -> None:
    """All three share a band, and the first is not like the others."""
    rows = [("a", [1, 2, 3], [7]), ("b", [4, 5, 6], [7]), ("c", [4, 5, 6, 8], [7]), ("d", [4, 5, 6], [9])]
    sketched = spark.createDataFrame(rows, "id string, shingles array<bigint>, bands array<bigint>")
    pairs = near.verify_pairs(near.find_candidates(sketched, Counter("bands")), sketched, 0.75).collect()
    assert [tuple(pair) for pair in pairs] == [("b", "c", 0.75)]
    assert near.verify_pairs(near.find_candidates(sketched, Counter("bands")), sketched, 0.76).collect() == []


def test_nothing_is_removed_from_nothing(spark: SparkSession) -> None:
    assert clusters(spark, {}, 1) == (set(), Clusters({}, {}, []))


def test_more_copies_than_are_compared_with_each_other_are_one_cluster(spark: SparkSession) -> None:
    """Each copy has another word of its own, and all share most bands: they say nothing besides what they share."""
    rows = {f"{place:02}": " ".join([*WORDS[:place], "other", *WORDS[place + 1 :]]) for place in range(3, 63)}
    remaining, near_duplicates = clusters(spark, rows, 2)
    assert (remaining, near_duplicates.sizes) == ({"03"}, {60: 1})


def test_a_crowd_of_examples_that_is_not_compared_is_told(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {f"{place:02}": " ".join([*WORDS, f"end{place}"]) for place in range(12)}
    monkeypatch.setattr(near, "_MAX_BAND_SIZE", 12)
    remaining, near_duplicates = clusters(spark, rows, 2)
    assert (remaining, near_duplicates.sizes, near_duplicates.crowded) == ({"00"}, {12: 1}, 0)
    monkeypatch.setattr(near, "_MAX_BAND_SIZE", 5)
    remaining, near_duplicates = clusters(spark, rows, 2)
    # Some share a band with fewer others.
    assert near_duplicates.crowded == 12
    assert len(remaining) < 12
    assert near.describe(near_duplicates).endswith(
        "; up to 12 examples share part of their text; only 5 of them are compared with each other"
    )


@pytest.mark.parametrize("seed", range(5))
def test_components_are_those_of_a_walk_along_the_edges(seed: int) -> None:
    chance = np.random.default_rng(seed)
    size = 60
    starts, ends = chance.integers(0, size, (2, 45))
    label = near.find_components(starts, ends, size)
    expected = np.arange(size)
    for _ in range(size):
        for a, b in zip(starts, ends, strict=True):
            expected[[a, b]] = expected[[a, b]].min()
    assert label.tolist() == expected.tolist()


def test_the_closest_node_is_that_of_the_most_similar_edge() -> None:
    starts, ends = np.array([0, 0, 1, 3]), np.array([1, 2, 2, 1])
    nearest, similarity = near.find_closest(starts, ends, np.array([0.7, 0.9, 0.9, 0.8]), 4)
    assert (nearest.tolist(), similarity.tolist()) == ([2, 2, 0, 1], [0.9, 0.9, 0.9, 0.8])


# Clusters, and their warnings.
WARNED: dict[str, tuple[Clusters, list[str]]] = {
    "half": (Clusters({2: 5}, {"": Source(10, 5)}, []), []),
    "more than half": (
        Clusters({3: 3}, {"": Source(10, 6)}, []),
        [
            "dedupe.near drops 6 of 10 examples: check the pairs in the report, and raise dedupe.near.threshold"
        ],
    ),
    "one cluster": (
        Clusters({1_007: 1}, {"": Source(2_000, 1_006)}, []),
        [
            "dedupe.near drops 1,006 of 2,000 examples; one cluster of near duplicates has 1,007 of 2,000 examples: check the pairs "
            "in the report, and raise dedupe.near.threshold"
        ],
    ),
    "a source": (
        Clusters({2: 6}, {"chat": Source(10, 6), "code": Source(90, 0)}, []),
        [
            "dedupe.near drops 6 of 10 examples of source chat: check the pairs in the report, and raise dedupe.near.threshold"
        ],
    ),
}


@pytest.mark.parametrize(("clustered", "warnings"), WARNED.values(), ids=WARNED)
def test_a_warning_where_over_half_is_removed(clustered: Clusters, warnings: list[str]) -> None:
    assert clustered.warnings == warnings
