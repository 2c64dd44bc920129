"""Hashes of runs of words, to find a text inside another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from finetune_trainer.prep.steps.sketch import hash_words, mix_bits

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    Longs = npt.NDArray[np.uint64]
    Counts = npt.NDArray[np.int64]

# 2**64 divided by the golden ratio: an odd factor whose bits are spread evenly.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Runs(NamedTuple):
    """Runs of words of texts.

    hashes: the hash of each run; equal words in the same order have the same hash, in every text.
    owners: the index of the text of each run.
    lengths: the number of words of each run.
    """

    hashes: Longs
    owners: Counts
    lengths: Counts


def hash_runs(texts: Sequence[str], lengths: Collection[int]) -> Runs:
    """Return all runs of words whose length is one of `lengths`. Case, punctuation and white space make no difference."""
    hashes_by_text = [hash_words(text.lower()) for text in texts]
    # The hash of each word, one text after the other, and the index of its text.
    words = np.array([word for hashes in hashes_by_text for word in hashes], np.uint64)
    owners = np.repeat(np.arange(len(texts)), [len(hashes) for hashes in hashes_by_text])
    matching = Runs(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    # The hash of the run that begins at each word; with each pass, the runs become one word longer.
    run_hashes = np.zeros(len(words), np.uint64)
    for length in range(1, max(lengths, default=0) + 1):
        run_count = len(words) - length + 1
        if run_count <= 0:
            break
        run_hashes = mix_bits((run_hashes[:run_count] + words[length - 1 :]) * _FACTOR)
        if length in lengths:
            # The first and the last word of a run must be of the same text.
            is_of_one_text = owners[:run_count] == owners[length - 1 :]
            more = (
                run_hashes[is_of_one_text],
                owners[:run_count][is_of_one_text],
                np.full(int(is_of_one_text.sum()), length),
            )
            matching = Runs(*map(np.append, matching, more))
    return matching


def hash_examples(texts: Sequence[str], lengths: Collection[int]) -> tuple[Longs, Counts]:
    """Return the distinct hashes of each text's runs, one text after the other, and the index at which the hashes of each text end.

    For example, if the indices begin with 12 and 30, the hashes at 12 to 29 are those of the second text.
    """
    distinct_runs = _deduplicate(hash_runs(texts, lengths))
    return distinct_runs.hashes, np.searchsorted(distinct_runs.owners, np.arange(len(texts)), side="right")


def _deduplicate(all_runs: Runs) -> Runs:
    """Return each run once per text, sorted by text."""
    order = np.lexsort((all_runs.hashes, all_runs.owners))
    hashes, owners = all_runs.hashes[order], all_runs.owners[order]
    is_first = np.ones(len(hashes), bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    return Runs(hashes[is_first], owners[is_first], all_runs.lengths[order][is_first])


def hash_evaluation_texts(texts: Sequence[str], ngram: int, fewest: int) -> tuple[Longs, Counts]:
    """Return the hashes of the runs that identify texts of an evaluation set, each once per text, and their numbers of words.

    A text of `ngram` words or more is identified by all its runs of `ngram` words; a shorter text of at least `fewest` words is one run.
    """
    distinct_runs = _deduplicate(hash_runs(texts, range(fewest, ngram + 1)))
    word_counts = np.array([len(hash_words(text.lower())) for text in texts], np.int64)
    is_compared = distinct_runs.lengths == np.minimum(word_counts, ngram)[distinct_runs.owners]
    return distinct_runs.hashes[is_compared], distinct_runs.lengths[is_compared]
