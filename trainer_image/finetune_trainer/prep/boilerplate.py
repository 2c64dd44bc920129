"""Text that many texts of a corpus share, such as a template, a licence or a fixed instruction: it says nothing about one of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as sf

from finetune_trainer.prep.sketch import shingles_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import DataFrame

    Longs = npt.NDArray[np.uint64]

# The runs of words that more texts share are boilerplate, in a corpus of any size: GPT-3's decontamination leaves them out
# (Brown et al. 2020, appendix C).
_MAX_TEXTS = 10
# Texts that are counted. A run in one of a thousand texts is in 20 of them.
_SAMPLED_TEXTS = 20_000
_BUCKETS = 2**30
_TEXTS_PER_BATCH = 500
# Runs that every Python worker keeps in memory, 8 bytes each. The most frequent ones count.
_MAX_SHINGLES = 200_000
_SHINGLE, _TEXTS = "shingle", "texts"


def limit(texts: int, share: float = 0.001) -> int:
    """Return in how many of several texts a run of words may be before it is boilerplate.

    Args:
        texts: the number of texts.
        share: of the texts, where that is more than ten of them. In a corpus of fewer than 20 texts it is half of them, and two
            texts alone share no boilerplate.
    """
    return max(2, min(_MAX_TEXTS, texts // 2), int(texts * share))


def shared_shingles(frame: DataFrame, text: str, texts: int) -> Longs:
    """Return the shingles that are boilerplate, sorted.

    They are counted in a sample of the texts, chosen by a hash of their ids.

    Args:
        frame: texts in lower case in the column `text`, with distinct ids in the column `id`.
        texts: the number of rows.
    """
    sampled = min(texts, _SAMPLED_TEXTS)
    if sampled <= limit(sampled):
        return np.empty(0, np.uint64)
    if sampled < texts:
        bucket = sf.pmod(sf.xxhash64("id", sf.lit("boilerplate")), sf.lit(_BUCKETS))
        frame = frame.where(bucket < sf.lit(_BUCKETS * sampled // texts))
    shingles = frame.select(text).mapInArrow(partial(_shingles, text=text), f"{_SHINGLE} bigint")
    counts = shingles.groupBy(_SHINGLE).agg(sf.count(sf.lit(1)).alias(_TEXTS))
    shared = (
        counts.where(sf.col(_TEXTS) > limit(sampled)).orderBy(sf.desc(_TEXTS), _SHINGLE).limit(_MAX_SHINGLES)
    )
    return np.sort(
        np.array([row[_SHINGLE] for row in shared.select(_SHINGLE).collect()], np.int64).view(np.uint64)
    )


def _shingles(batches: Iterable[pa.RecordBatch], *, text: str) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _TEXTS_PER_BATCH):
            shingles, _ = shingles_of(batch.slice(start, _TEXTS_PER_BATCH).column(text).to_pylist())
            yield pa.RecordBatch.from_arrays([pa.array(shingles.view(np.int64))], [_SHINGLE])
