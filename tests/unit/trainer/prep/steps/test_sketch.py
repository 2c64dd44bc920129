"""Sketches of texts: shingles, and bands that near duplicates share."""

from __future__ import annotations

import numpy as np
import pytest

from finetune_trainer.prep.steps.sketch import (
    Banding,
    Boilerplate,
    Sketches,
    choose_banding,
    hash_shingles,
    sketch,
)


def shingles(sketches: Sketches) -> list[set[int]]:
    """The shingles of each text."""
    starts = [0, *sketches.ends.tolist()]
    return [
        set(sketches.shingles[start:end].tolist())
        for start, end in zip(starts, sketches.ends.tolist(), strict=False)
    ]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1])
def test_a_pair_at_the_threshold_is_found(threshold: float) -> None:
    shape = choose_banding(threshold)
    assert shape.match_probability(threshold) >= 0.97
    # One more row in a band would find too few, unless there is no such band.
    narrower = Banding(128 // (shape.rows + 1), shape.rows + 1)
    assert narrower.bands == 0 or narrower.match_probability(threshold) < 0.97


SHINGLES = [
    ("", 0),
    (" -- ?", 0),
    ("one", 1),
    ("one two", 1),
    ("one two three", 1),
    ("one two three four", 2),
    ("one, two; three -- four!", 2),
    ("one two three one two three one two three", 3),
    ("\u5b66\u4e60\u6a21\u578b", 2),
    ("1 2 3 4 5", 3),
]


@pytest.mark.parametrize(("text", "count"), SHINGLES)
def test_shingles_are_distinct_runs_of_three_words(text: str, count: int) -> None:
    assert [len(hashes) for hashes in shingles(sketch([text], choose_banding(0.7)))] == [count]


def test_a_text_has_the_same_sketch_beside_any_other() -> None:
    texts = ["", "one", "one two", "one two three four", "five one two three four", "one"]
    together = sketch(texts, choose_banding(0.7))
    alone = [sketch([text], choose_banding(0.7)) for text in texts]
    assert shingles(together) == [shingles(sketches)[0] for sketches in alone]
    assert together.bands.tolist() == [sketches.bands[0].tolist() for sketches in alone]
    assert together.bands[1].tolist() == together.bands[5].tolist() != together.bands[2].tolist()


def test_a_text_has_the_same_sketch_in_every_process() -> None:
    sketches = sketch(["the answer to the question"], Banding(2, 64))
    assert sketches.shingles.tolist() == [4040344567790176928, 11660623596785761380, 15062717866719320911]
    assert sketches.bands.tolist() == [[2720516737519856323, 9841510069980253992]]


def test_the_share_of_common_shingles_is_that_of_common_runs_of_words() -> None:
    first, second = shingles(sketch(["a b c d e f", "a b c d x f"], choose_banding(0.7)))
    assert (len(first & second), len(first | second)) == (2, 6)


# A text of which runs of three words are boilerplate, these runs, and the runs that count.
BOILERPLATE = {
    "what comes before and behind": (
        "a b c d own1 own2 own3 e f g",
        ["a b c", "b c d", "e f g"],
        ["c d own1", "d own1 own2", "own1 own2 own3", "own2 own3 e", "own3 e f"],
    ),
    "an edited word is nothing of its own": (
        "a b c d edit e f g",
        ["a b c", "b c d", "e f g"],
        ["a b c", "b c d", "c d edit", "d edit e", "edit e f", "e f g"],
    ),
    "nothing else": ("a b c d", ["a b c", "b c d"], ["a b c", "b c d"]),
    "not in the text": ("a b c d", ["x y z"], ["a b c", "b c d"]),
    "no words": ("", ["a b c"], []),
}


def boilerplate_of(runs: list[str], of_most: list[str]) -> Boilerplate:
    hashes = np.sort(np.concatenate([hash_shingles([run])[0] for run in runs]))
    return Boilerplate(
        hashes, np.isin(hashes, [hashed for run in of_most for hashed in hash_shingles([run])[0].tolist()])
    )


@pytest.mark.parametrize(("text", "boilerplate", "counted"), BOILERPLATE.values(), ids=BOILERPLATE)
def test_boilerplate_counts_for_nothing_in_a_text_that_says_more(
    text: str, boilerplate: list[str], counted: list[str]
) -> None:
    shared = boilerplate_of(boilerplate, of_most=[])
    # Beside another text, whose words are not part of this one.
    texts = ["some other words", text, "some more words"]
    hashes, owners = hash_shingles(texts, shared)
    expected = [hash_shingles([run])[0] for run in counted]
    assert (
        hashes[owners == 1].tolist() == np.sort(np.concatenate([np.empty(0, np.uint64), *expected])).tolist()
    )


FRAME, ARTICLE = (" ".join(f"{name}{at}" for at in range(30)) for name in ("frame", "article"))
# Texts, and the parts of them whose runs of three words count, where most texts share the frame, and fewer the article.
TIERS = {
    "a frame": (f"{FRAME} own1 own2 own3", ["frame28 frame29 own1 own2 own3"]),
    "a frame alone": (FRAME, [FRAME]),
    "an article with little else": (f"{ARTICLE} own1 own2 own3", [f"{ARTICLE} own1 own2 own3"]),
    "an article with more": (
        f"{ARTICLE} own1 own2 own3 own4",
        ["article28 article29 own1 own2 own3 own4"],
    ),
    "an article with little else in a frame": (
        f"{FRAME} {ARTICLE} own1 own2 own3",
        [f"frame28 frame29 {ARTICLE} own1 own2 own3"],
    ),
    "an article with more in a frame": (
        f"{FRAME} {ARTICLE} own1 own2 own3 own4",
        ["frame28 frame29 article0 article1", "article28 article29 own1 own2 own3 own4"],
    ),
}


@pytest.mark.parametrize(("text", "counted"), TIERS.values(), ids=TIERS)
def test_what_fewer_texts_share_counts_for_nothing_where_a_tenth_of_the_words_is_not_shared(
    text: str, counted: list[str]
) -> None:
    runs = [" ".join(shared.split()[at : at + 3]) for shared in (FRAME, ARTICLE) for at in range(28)]
    hashes = shingles(sketch([text], choose_banding(0.7), boilerplate_of(runs, of_most=runs[:28])))
    assert hashes == [{hashed for part in counted for hashed in hash_shingles([part])[0].tolist()}]
