"""Hashes of runs of words, by which a text is found in another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from finetune_trainer.prep.steps.sketch import hashed_words, mixed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    Longs = npt.NDArray[np.uint64]
    Counts = npt.NDArray[np.int64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Runs(NamedTuple):
    """Runs of words of texts.

    hashes: of each run; equal words in the same order have the same hash, in every text.
    owners: the index of the text of each. lengths: the words of each.
    """

    hashes: Longs
    owners: Counts
    lengths: Counts


def runs(texts: Sequence[str], lengths: Collection[int]) -> Runs:
    """Return all runs of these numbers of words. Case, punctuation and white space make no difference."""
    words = [hashed_words(text.lower()) for text in texts]
    hashes = np.array([word for text in words for word in text], np.uint64)
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in words])
    found = Runs(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))
    so_far = np.zeros(len(hashes), np.uint64)
    for length in range(1, max(lengths, default=0) + 1):
        last = len(hashes) - length + 1
        if last <= 0:
            break
        # The hash of the first words of a run, with one more.
        so_far = mixed((so_far[:last] + hashes[length - 1 :]) * _FACTOR)
        if length in lengths:
            whole = owners[:last] == owners[length - 1 :]
            more = so_far[whole], owners[:last][whole], np.full(int(whole.sum()), length)
            found = Runs(*map(np.append, found, more))
    return found


def of_examples(texts: Sequence[str], lengths: Collection[int]) -> tuple[Longs, Counts]:
    """Return the different hashes of each text's runs, one text after the other, and the end of each text's."""
    found = _distinct(runs(texts, lengths))
    return found.hashes, np.searchsorted(found.owners, np.arange(len(texts)), side="right")


def _distinct(several: Runs) -> Runs:
    """Return each run of a text once, sorted by their texts."""
    order = np.lexsort((several.hashes, several.owners))
    hashes, owners = several.hashes[order], several.owners[order]
    new = np.ones(len(hashes), bool)
    new[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
    return Runs(hashes[new], owners[new], several.lengths[order][new])


def of_evaluation(texts: Sequence[str], ngram: int, fewest: int) -> tuple[Longs, Counts]:
    """Return the hashes of the runs by which texts of an evaluation set are found, each once for a text, and the words of each.

    Of a text of `ngram` words and more: all runs of `ngram` words. Of one with at least `fewest`: the whole text.
    """
    found = _distinct(runs(texts, range(fewest, ngram + 1)))
    words = np.array([len(hashed_words(text.lower())) for text in texts], np.int64)
    wanted = found.lengths == np.minimum(words, ngram)[found.owners]
    return found.hashes[wanted], found.lengths[wanted]
