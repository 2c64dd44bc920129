"""Sketches of texts: their shingles (hashes of runs of words), and their MinHash bands, of which near duplicates likely share one.

MinHash estimates the Jaccard similarity of two sets of shingles (Broder 1997, On the resemblance and containment of
documents). Banding turns the estimate into a test that similar pairs pass with high probability (Leskovec, Rajaraman and Ullman,
Mining of Massive Datasets, section 3.4).
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Longs = npt.NDArray[np.uint64]
    Counts = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

SHINGLE_WORDS = 3
"""Words in a shingle."""
OWN_WORDS = 3
"""Consecutive words outside boilerplate that make a text more than a copy; fewer may be edits of a copy."""
# Minimum share of a text's words outside boilerplate. A text with a lower share is a copy of the boilerplate, for example an article
# with another headline.
_MIN_OWN_SHARE = 0.1
# Number of hash functions of MinHash. Each band has an equal share of them.
_HASHES = 128
# Least probability that a pair just at the threshold shares a band.
_MIN_RECALL = 0.97
# Scripts without spaces between words: each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
# Multiply-shift hashing: odd factors, and the upper half of each product. A fixed seed: the same text has the same bands in every pod.
_RANDOM = np.random.Generator(np.random.PCG64(20261122))
_FACTORS: Longs = _RANDOM.integers(0, 2**64, _HASHES, dtype=np.uint64) | np.uint64(1)
_OFFSETS: Longs = _RANDOM.integers(0, 2**64, _HASHES, dtype=np.uint64)
_PLACE_FACTORS: Longs = _RANDOM.integers(0, 2**64, SHINGLE_WORDS, dtype=np.uint64) | np.uint64(1)
_HALF = np.uint64(32)


class Boilerplate(NamedTuple):
    """Shingles that many texts of a corpus share.

    shingles: sorted. of_most: which of them are in more than half of the texts.
    """

    shingles: Longs
    of_most: Flags


_NO_BOILERPLATE = Boilerplate(np.empty(0, np.uint64), np.empty(0, np.bool_))


class Banding(NamedTuple):
    """`bands` groups of `rows` MinHash values: two texts share a band if all values of the band are equal."""

    bands: int
    rows: int

    def match_probability(self, similarity: float) -> float:
        """Return the probability that two texts of this Jaccard similarity share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


class Sketches(NamedTuple):
    """Sketches of texts.

    shingles: hashes of each text's shingles, sorted and distinct, one text after the other.
    ends: for each text, the end of its shingles.
    bands: hashes of the bands, texts x bands.
    """

    shingles: Longs
    ends: Counts
    bands: Longs


def choose_banding(threshold: float) -> Banding:
    """Return the banding with the fewest false candidates that finds a pair at the threshold with the probability _MIN_RECALL."""
    # More rows in a band mean fewer false candidates, so the bandings with the most rows come first.
    candidates = (Banding(_HASHES // rows, rows) for rows in range(_HASHES, 0, -1))
    return next(
        (candidate for candidate in candidates if candidate.match_probability(threshold) >= _MIN_RECALL),
        Banding(_HASHES, rows=1),
    )


def sketch(texts: Sequence[str], banding: Banding, boilerplate: Boilerplate = _NO_BOILERPLATE) -> Sketches:
    """Sketch texts, which must be in lower case.

    A text of fewer than SHINGLE_WORDS words is one shingle; a text without words has no shingles.

    Args:
        boilerplate: shingles to ignore in a text with content of its own; a text without such content is an edited copy of the
            boilerplate. There are two sets: all shingles, and the common ones, which are in more than half of the texts. A text
            has content outside of a set if OWN_WORDS consecutive words are in no shingle of the set; the text then ignores the
            set. To ignore all shingles, the words outside all of them must also be at least _MIN_OWN_SHARE of the words outside
            the common ones.
    """
    shingles, owners = hash_shingles(texts, boilerplate)
    starts = np.searchsorted(owners, np.arange(len(texts)))
    ends = np.append(starts[1:], len(owners))
    return Sketches(shingles, ends, _hash_bands(shingles, starts, ends, banding))


def hash_shingles(texts: Sequence[str], boilerplate: Boilerplate = _NO_BOILERPLATE) -> tuple[Longs, Counts]:
    """Return the distinct shingles of each text, and the index of the text of each shingle, in ascending order.

    Args:
        boilerplate: see `sketch`.
    """
    word_hashes: list[int] = []
    counts = np.empty(len(texts), np.int64)
    for index, text in enumerate(texts):
        hashed = hash_words(text)
        # A text of fewer words than a shingle is padded to one shingle.
        padding = max(SHINGLE_WORDS - len(hashed), 0) if hashed else 0
        word_hashes += [*hashed, *([0] * padding)]
        counts[index] = len(hashed) + padding
    words = np.array(word_hashes, np.uint64)
    # The index of the text of each word.
    owners = np.repeat(np.arange(len(texts)), counts)
    shingle_count = max(len(words) - SHINGLE_WORDS + 1, 0)
    shingles = np.zeros(shingle_count, np.uint64)
    for place, factor in enumerate(_PLACE_FACTORS):
        shingles = mix_bits(shingles + words[place : place + shingle_count] * factor)
    # A shingle does not reach from one text into the next.
    is_counted = owners[:shingle_count] == owners[SHINGLE_WORDS - 1 :]
    if boilerplate.shingles.size:
        is_counted &= ~_is_ignored(shingles, is_counted, owners, boilerplate)
    shingles, owners = shingles[is_counted], owners[:shingle_count][is_counted]
    order = np.lexsort((shingles, owners))
    shingles, owners = shingles[order], owners[order]
    is_first = np.ones(len(shingles), bool)
    is_first[1:] = (shingles[1:] != shingles[:-1]) | (owners[1:] != owners[:-1])
    return shingles[is_first], owners[is_first]


def _is_ignored(shingles: Longs, is_whole: Flags, owners: Counts, boilerplate: Boilerplate) -> Flags:
    """Return which shingles are ignored: boilerplate in texts with content of their own, see `sketch`.

    Args:
        shingles: the shingle at each word except the last words.
        is_whole: whether a shingle is of one text.
        owners: the text of each word.
    """
    if not owners.size:
        return np.zeros(len(shingles), np.bool_)
    places = np.minimum(np.searchsorted(boilerplate.shingles, shingles), len(boilerplate.shingles) - 1)
    is_shared = is_whole & (boilerplate.shingles[places] == shingles)
    is_common = is_shared & boilerplate.of_most[places]
    is_outside_all, is_outside_common = _is_outside(is_shared), _is_outside(is_common)
    texts = int(owners[-1]) + 1
    words_outside_all = np.bincount(owners[is_outside_all], minlength=texts)
    words_outside_common = np.bincount(owners[is_outside_common], minlength=texts)
    # For each text: whether it ignores all shared shingles, and whether it ignores the common ones.
    ignores_all = _has_own_words(is_outside_all, owners) & (
        words_outside_all >= _MIN_OWN_SHARE * words_outside_common
    )
    ignores_common = _has_own_words(is_outside_common, owners)
    text_of_shingle = owners[: len(shingles)]
    is_ignored: Flags = (is_common & ignores_common[text_of_shingle]) | (
        is_shared & ignores_all[text_of_shingle]
    )
    return is_ignored


def _is_outside(is_chosen: Flags) -> Flags:
    """Return which words are in no chosen shingle."""
    outside = np.ones(len(is_chosen) + SHINGLE_WORDS - 1, np.bool_)
    for word in range(SHINGLE_WORDS):
        outside[word : word + len(is_chosen)] &= ~is_chosen
    return outside


def _has_own_words(is_own: Flags, owners: Counts) -> Flags:
    """Return which texts have OWN_WORDS words in a row that `is_own` marks as outside boilerplate."""
    # Whether the OWN_WORDS words from each word on are outside boilerplate and of one text.
    runs = is_own[: len(is_own) - OWN_WORDS + 1].copy()
    for word in range(1, OWN_WORDS):
        runs &= is_own[word : word + len(runs)] & (owners[word : word + len(runs)] == owners[: len(runs)])
    has_own_words = np.zeros(int(owners[-1]) + 1, np.bool_)
    has_own_words[owners[: len(runs)][runs]] = True
    return has_own_words


def _hash_bands(shingles: Longs, starts: Counts, ends: Counts, banding: Banding) -> Longs:
    """Return the bands of each text; the bands of a text without shingles are 0."""
    bands = np.zeros((len(starts), banding.bands), np.uint64)
    has_shingles = ends > starts
    # `reduceat` reads from each start to the next, so texts without shingles are left out.
    starts = starts[has_shingles]
    if not len(starts):
        return bands
    for band in range(banding.bands):
        # Begins with the number of the band, so that equal values in two bands have different hashes.
        joined = np.full(len(starts), band + 1, np.uint64)
        for row in range(band * banding.rows, (band + 1) * banding.rows):
            least = np.minimum.reduceat((shingles * _FACTORS[row] + _OFFSETS[row]) >> _HALF, starts)
            # Any odd factor serves here.
            joined = mix_bits(joined * _PLACE_FACTORS[0] + least)
        bands[has_shingles, band] = joined
    return bands


def hash_words(text: str) -> list[int]:
    """Return a hash of each word of a text, which must be in lower case. A word is a run of letters and digits, see `_WORD`."""
    return [_hash_word(word) for word in _WORD.findall(text)]


@lru_cache(maxsize=1 << 16)
def _hash_word(word: str) -> int:
    # Two fast checksums are one hash of 64 bits. A word may have an unpaired surrogate.
    data = word.encode("utf-8", "surrogatepass")
    return zlib.crc32(data) << 32 | zlib.adler32(data)


def mix_bits(values: Longs) -> Longs:
    """Spread the bits of each value (the finaliser of MurmurHash3, Austin Appleby)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))
