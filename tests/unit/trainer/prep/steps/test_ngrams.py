"""Runs of words: what is the same run, and by which runs a text of an evaluation set is found."""

from __future__ import annotations

import random

import pytest

from finetune_trainer.prep.steps.ngrams import hash_evaluation_texts, hash_examples, hash_runs

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "far", "away", "into"]


def shares(example: str, evaluation: str, ngram: int = 5, fewest: int = 3) -> bool:
    """Whether an example has a run by which a text of an evaluation set is found."""
    evaluation_hashes, lengths = hash_evaluation_texts([evaluation], ngram, fewest)
    example_hashes, _ = hash_examples([example], {*lengths.tolist()})
    return bool({*evaluation_hashes.tolist()} & {*example_hashes.tolist()})


SHARED: dict[str, tuple[str, str, bool]] = {
    "all of it": ("one two three four five", "one two three four five", True),
    "five words in the middle": ("a b one two three four five c", "x one two three four five y z", True),
    "four words": ("a b one two three four c d e", "x one two three four y z q", False),
    "case, punctuation and white space": (
        "One, two... THREE\n\tfour: 'five'!",
        "one two (three) four five",
        True,
    ),
    "another order": ("five four three two one", "one two three four five", False),
    "a word left out": ("one two three five six seven", "one two three four five six seven", False),
    "a short text, whole": ("a b one two three c d", "one two three", True),
    "a part of a short text": ("a b one two three c d", "one two three four", False),
    "a text that is too short": ("one two", "one two", False),
    "an example that is too short": ("one two", "one two three", False),
    "characters of Chinese": (
        "\u6211\u4eec\u4eca\u5929\u53bb\u5b66\u6821",
        "\u4eca\u5929\u53bb\u5b66\u6821",
        True,
    ),
    "nothing": ("", "", False),
}


@pytest.mark.parametrize(("example", "evaluation", "expected"), SHARED.values(), ids=SHARED)
def test_what_shares_a_run(example: str, evaluation: str, expected: bool) -> None:
    assert shares(example, evaluation) == expected


def test_a_run_does_not_reach_from_one_text_into_the_next() -> None:
    runs = hash_runs(["one two", "three four", "", "one two"], [2, 3])
    assert runs.owners.tolist() == [0, 1, 3]
    assert runs.lengths.tolist() == [2, 2, 2]
    assert runs.hashes[0] == runs.hashes[2] != runs.hashes[1]


def test_each_run_of_an_example_is_there_once() -> None:
    hashes, ends = hash_examples(["a b a b a b", "", "a b"], [2])
    assert ends.tolist() == [2, 2, 3]
    assert hashes[2] in hashes[:2]


@pytest.mark.parametrize("seed", range(3))
def test_runs_have_equal_hashes_where_they_have_equal_words(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    texts = [chance.choices(WORDS, k=chance.randint(0, 30)) for _ in range(40)]
    runs = hash_runs([" ".join(words) for words in texts], [1, 3, 4])
    word_runs = [
        (length, tuple(words[start : start + length]), owner)
        for length in (1, 3, 4)
        for owner, words in enumerate(texts)
        for start in range(len(words) - length + 1)
    ]
    assert [(length, owner) for length, _, owner in word_runs] == [
        *zip(runs.lengths.tolist(), runs.owners.tolist(), strict=True)
    ]
    pairs = {(run, value) for (_, run, _), value in zip(word_runs, runs.hashes.tolist(), strict=True)}
    assert len(pairs) == len({run for run, _ in pairs}) == len({value for _, value in pairs})
