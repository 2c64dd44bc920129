"""Finds text that many texts of a corpus share, for example a template, a licence or a fixed instruction.

Text is compared as shingles: hashes of runs of a few words, see `sketch`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as sf

from finetune_trainer.prep.steps.sketch import Boilerplate, hash_shingles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import DataFrame

# Runs of words that at most this many texts share are not boilerplate, in a corpus of 20 texts or more: GPT-3's decontamination ignores
# runs that more texts share (Brown et al. 2020, appendix C).
_MAX_TEXTS = 10
# Boilerplate is in more than this share of the texts of a large corpus. A run in fewer texts is from copies of a text, which are near duplicates.
_SHARE = 0.02
# Size of the sample: a run in _SHARE of all texts is in about 400 of these, enough to count it reliably.
_SAMPLED_TEXTS = 20_000
_BUCKETS = 2**30
_TEXTS_PER_BATCH = 500
# Shingles that every Python worker keeps in memory, 9 bytes each. Only the most frequent shingles are kept.
_MAX_SHINGLES = 200_000
_SHINGLE, _TEXTS = "shingle", "texts"


def limit(texts: int, share: float = _SHARE) -> int:
    """Return how many of `texts` texts may share a run of words before it is boilerplate.

    The limit is ten texts, or `share` of the texts if that is more. Below 20 texts, it is half of them, but at least 2. For example,
    with a share of 0.02, 7 of 15 texts, 10 of 100, and 200 of 10,000.
    """
    return max(2, min(_MAX_TEXTS, texts // 2), int(texts * share))


def find_boilerplate(frame: DataFrame, text: str, texts: int) -> Boilerplate:
    """Return the shingles that are boilerplate.

    Shingles are counted in a sample of the texts, chosen by a hash of the ids.

    Args:
        frame: texts in lower case in the column `text`, with distinct ids in the column `id`.
        texts: the number of rows.
    """
    sampled = min(texts, _SAMPLED_TEXTS)
    # Not even a shingle in all texts would exceed the limit.
    if sampled <= limit(sampled):
        return Boilerplate(np.empty(0, np.uint64), np.empty(0, np.bool_))
    if sampled < texts:
        bucket = sf.pmod(sf.xxhash64("id", sf.lit("boilerplate")), sf.lit(_BUCKETS))
        frame = frame.where(bucket < sf.lit(_BUCKETS * sampled // texts))
    shingles = frame.select(text).mapInArrow(partial(_hash_batches, text=text), f"{_SHINGLE} bigint")
    counts = shingles.groupBy(_SHINGLE).agg(sf.count(sf.lit(1)).alias(_TEXTS))
    shared = (
        counts.where(sf.col(_TEXTS) > limit(sampled)).orderBy(sf.desc(_TEXTS), _SHINGLE).limit(_MAX_SHINGLES)
    )
    rows = shared.collect()
    hashes = np.array([row[_SHINGLE] for row in rows], np.int64).view(np.uint64)
    of_most = np.array([2 * row[_TEXTS] > sampled for row in rows], np.bool_)
    order = np.argsort(hashes)
    return Boilerplate(hashes[order], of_most[order])


def _hash_batches(batches: Iterable[pa.RecordBatch], *, text: str) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _TEXTS_PER_BATCH):
            shingles, _ = hash_shingles(batch.slice(start, _TEXTS_PER_BATCH).column(text).to_pylist())
            yield pa.RecordBatch.from_arrays([pa.array(shingles.view(np.int64))], [_SHINGLE])
