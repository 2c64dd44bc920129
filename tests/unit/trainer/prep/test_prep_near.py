"""Near duplicates: which examples are removed from a corpus whose rows say where they come from."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from finetune_crds.prepare import NearDedupe
from finetune_trainer.prep import near
from finetune_trainer.prep.counter import Counter
from finetune_trainer.prep.near import Clusters

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = [
    f"{first}{last}" for first in ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti") for last in "bdfglmnprstvz"
]
LETTER = (
    "write a short letter to a friend whom you have not seen for many years, ask how the family is, tell of the new house, "
    "and end with an invitation to the town of"
)
LICENCE = (
    "licensed under the terms below: permission is granted, free of charge, to any person who has a copy of this "
    "software, to use it without restriction, and the software is provided as it is, without warranty of any kind. "
)


class Row(NamedTuple):
    """A text, and the text that it is an edited copy of: its own name for one that is none."""

    text: str
    origin: str


def corpus(seed: int = 7) -> dict[str, Row]:
    """Originals, each with up to three copies of few edits, and independent texts that look alike."""
    chance = random.Random(seed)  # noqa: S311
    rows: dict[str, Row] = {}

    def add(text: str, origin: str | None = None) -> str:
        name = f"{chance.getrandbits(64):016x}"
        rows[name] = Row(text, origin or name)
        return name

    def words(count: int) -> list[str]:
        return chance.choices(WORDS, k=count)

    for _ in range(150):
        text = words(chance.randint(60, 200))
        origin = add(" ".join(text))
        for _ in range(chance.randint(0, 3)):
            add(edited(text, chance), origin)
    for _ in range(60):
        add(f"{LETTER} {' '.join(words(15))}")
        add(LICENCE + " ".join(words(20)))
        add(" ".join(str(chance.randint(0, 999)) for _ in range(80)))
    return rows


def edited(text: list[str], chance: random.Random) -> str:
    """A copy with one to three words changed, added or left out."""
    copy = list(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(copy))
        change = chance.choice(("change", "add", "leave out"))
        copy[place : place + (change != "add")] = [] if change == "leave out" else ["other"]
    return " ".join(copy)


def clusters(spark: SparkSession, rows: dict[str, str], partitions: int) -> tuple[set[str], Clusters]:
    """The ids that stay, and what was found."""
    frame = spark.createDataFrame([*rows.items()], f"id string, {near.TEXT} string").repartition(partitions)
    with ExitStack() as held:
        left, found = near.removed(frame, NearDedupe(), held)
        assert left.columns == ["id"]
        return {row["id"] for row in left.collect()}, found


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return corpus()


@pytest.fixture(scope="module")
def result(spark: SparkSession, rows: dict[str, Row]) -> tuple[set[str], Clusters]:
    """The ids of the corpus that stay, and what was found, on four partitions."""
    return clusters(spark, {name: row.text for name, row in rows.items()}, 4)


def test_edited_copies_are_removed_and_texts_that_look_alike_stay(
    rows: dict[str, Row], result: tuple[set[str], Clusters]
) -> None:
    left, found = result
    groups: dict[str, list[str]] = {}
    for name, row in rows.items():
        groups.setdefault(row.origin, []).append(name)
    copies = sum(len(members) - 1 for members in groups.values())
    gone = set(rows) - left
    assert found.dropped == len(gone)
    # A row that went is right when another of its origin stays.
    right = [name for name in gone if left & set(groups[rows[name].origin])]
    assert len(right) / len(gone) >= 0.99
    assert len(right) / copies >= 0.95


@pytest.mark.parametrize("partitions", [1, 16])
def test_the_same_examples_stay_on_any_number_of_partitions(
    spark: SparkSession, rows: dict[str, Row], result: tuple[set[str], Clusters], partitions: int
) -> None:
    assert clusters(spark, {name: row.text for name, row in rows.items()}, partitions) == result


def test_the_least_id_of_a_cluster_stays(spark: SparkSession) -> None:
    text = " ".join(WORDS)
    rows = {"c": text, "a": f"{text} more", "b": f"some {text}", "d": "quite another text", "e": ""}
    assert clusters(spark, rows, 2) == ({"a", "d", "e"}, Clusters({3: 1}, []))


def test_examples_that_meet_behind_another_are_compared(spark: SparkSession) -> None:
    """All three share a band, and the first is not like the others."""
    rows = [("a", [1, 2, 3], [7]), ("b", [4, 5, 6], [7]), ("c", [4, 5, 6, 8], [7]), ("d", [4, 5, 6], [9])]
    sketched = spark.createDataFrame(rows, "id string, shingles array<bigint>, bands array<bigint>")
    pairs = near.verified(near.candidates(sketched, Counter("bands")), sketched, 0.75).collect()
    assert [tuple(pair) for pair in pairs] == [("b", "c")]
    assert near.verified(near.candidates(sketched, Counter("bands")), sketched, 0.76).collect() == []


def test_nothing_is_removed_from_nothing(spark: SparkSession) -> None:
    assert clusters(spark, {}, 1) == (set(), Clusters({}, []))


def test_more_copies_than_are_compared_with_each_other_are_one_cluster(spark: SparkSession) -> None:
    """Each copy has another word of its own, and all share most bands."""
    rows = {f"{place:02}": " ".join([*WORDS[:place], "other", *WORDS[place + 1 :]]) for place in range(60)}
    assert clusters(spark, rows, 2) == ({"00"}, Clusters({60: 1}, []))


def test_a_crowd_of_examples_that_is_not_compared_is_told(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {f"{place:02}": " ".join([*WORDS, f"end{place}"]) for place in range(12)}
    monkeypatch.setattr(near, "_BAND", 12)
    assert clusters(spark, rows, 2) == ({"00"}, Clusters({12: 1}, []))
    monkeypatch.setattr(near, "_BAND", 5)
    left, found = clusters(spark, rows, 2)
    # Some share a band with fewer others.
    assert found.crowded == 12
    assert len(left) < 12
    assert near.described(found).endswith(
        "; up to 12 examples share a part of their text, of which 5 are compared with each other"
    )


@pytest.mark.parametrize("seed", range(5))
def test_components_are_those_of_a_walk_along_the_edges(seed: int) -> None:
    chance = np.random.default_rng(seed)
    size = 60
    one, other = chance.integers(0, size, (2, 45))
    label = near.components(one, other, size)
    expected = np.arange(size)
    for _ in range(size):
        for a, b in zip(one, other, strict=True):
            expected[[a, b]] = expected[[a, b]].min()
    assert label.tolist() == expected.tolist()
