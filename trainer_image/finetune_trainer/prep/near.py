"""Near duplicates: MinHash finds candidates, and a pair counts when its exact Jaccard similarity reaches the threshold.

Which examples stay depends on their texts and ids alone, never on partitions or order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyspark.sql import functions as sf

from finetune_trainer.prep.counter import Counter
from finetune_trainer.prep.keep import keep
from finetune_trainer.prep.plan import LABEL
from finetune_trainer.prep.samples import CHARACTERS, beginnings
from finetune_trainer.prep.sketch import banding, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import ExitStack

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from finetune_crds.prepare import NearDedupe
    from finetune_trainer.prep.sketch import Banding

    Longs = npt.NDArray[np.int64]

TEXT = "plain"
"""Column with the text that is compared: an example in lower case, its white space folded."""
_ID = "id"
_SHINGLES, _BANDS, _FIRST_ID = "shingles", "bands", "first"
_SKETCHED = f"{_ID} string, {_SHINGLES} array<bigint>, {_BANDS} array<bigint>"
_CLUSTERED = f"{_ID} string, {_FIRST_ID} string"
# The examples of a band are compared with its first ones, and each with those before it: pairs grow with the number of
# examples, not with its square.
_FIRST, _BEFORE = 8, 8
# Examples of one band that are compared; a band with more is that of a text which half the corpus shares.
_BAND = 50_000
# What takes the bands of bad answers away from those of good ones.
_BAD = np.uint64(0x9E3779B97F4A7C15)
# Texts that are sketched at once: their hashes stay in the processor's cache.
_AT_ONCE = 500


class Clusters(NamedTuple):
    """Near duplicates that were found.

    sizes: number of clusters by their size. samples: some examples that are removed, each with the one that stays. crowded:
    the number of examples of the largest band, if it has more than are compared; else 0.
    """

    sizes: dict[int, int]
    samples: list[str]
    crowded: int = 0

    @property
    def dropped(self) -> int:
        """Examples that are removed."""
        return sum((size - 1) * clusters for size, clusters in self.sizes.items())


def removed(
    frame: DataFrame, wanted: NearDedupe, held: ExitStack, samples: int = 0
) -> tuple[DataFrame, Clusters]:
    """Return the frame without near duplicates and without the column of the compared text, and what was found.

    Of each cluster, the example with the least id stays.

    Args:
        frame: examples with distinct ids, and labels if they have any. It is read twice.
        held: ends what the returned frame needs.
        samples: how many examples that are removed are kept as samples.
    """
    shape = banding(wanted.threshold)
    texts = frame.select(_ID, TEXT, *([LABEL] if LABEL in frame.columns else []))
    sketched = texts.mapInArrow(partial(_sketched, shape=shape), _SKETCHED)
    sketched = keep(sketched, held)
    bands = Counter("bands")
    pairs = verified(candidates(sketched, bands), sketched, wanted.threshold)
    members = pairs.repartition(1).mapInArrow(_clustered, _CLUSTERED)
    members = keep(members, held)
    gone = members.where(sf.col(_ID) != sf.col(_FIRST_ID)).select(_ID)
    found = Clusters(_sizes(members), _drawn(frame, members, samples))
    # NB: executors that are lost cannot change the greatest size.
    largest = bands.read(again=False)["largest"] or 0
    found = found._replace(crowded=largest if largest > _BAND else 0)
    return frame.drop(TEXT).join(gone, _ID, "left_anti"), found


def described(found: Clusters) -> str:
    """Return what was found as a line of the log."""
    crowd = f"; {crowded(found.crowded)}" if found.crowded else ""
    if not found.sizes:
        return f"near duplicates: none{crowd}"
    clusters = sum(found.sizes.values())
    stays = "stays" if clusters == 1 else "stay"
    return (
        f"near duplicates: {clusters + found.dropped:,} examples, of which {clusters:,} {stays}; the largest cluster has "
        f"{max(found.sizes):,}{crowd}"
    )


def crowded(examples: int) -> str:
    """Return what was not compared, in a sentence; `examples`: of the largest band."""
    return f"up to {examples:,} examples share a part of their text, of which {_BAND:,} are compared with each other"


def _sizes(members: DataFrame) -> dict[int, int]:
    sizes = members.groupBy(_FIRST_ID).agg(sf.count(sf.lit(1)).alias("size")).groupBy("size").count()
    return {row["size"]: row["count"] for row in sizes.orderBy("size").collect()}


def _drawn(frame: DataFrame, members: DataFrame, samples: int) -> list[str]:
    pairs = (
        members.where(sf.col(_ID) != sf.col(_FIRST_ID)).orderBy(_ID).limit(samples).collect()
        if samples
        else []
    )
    both = [text for pair in pairs for text in pair]
    texts = beginnings(frame, TEXT, both, CHARACTERS // 2)
    return [f"{texts[pair[_ID]]}\n\nlike:\n{texts[pair[_FIRST_ID]]}" for pair in pairs]


def _sketched(batches: Iterable[pa.RecordBatch], *, shape: Banding) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _AT_ONCE):
            part = batch.slice(start, _AT_ONCE)
            found = sketch(part.column(TEXT).to_pylist(), shape)
            if LABEL in part.schema.names:
                # Of examples that are judged differently, none is a duplicate.
                bad = ~part.column(LABEL).to_numpy(zero_copy_only=False).astype(bool)
                found.bands[bad] ^= _BAD
            ends = np.append(0, found.ends).astype(np.int32)
            wide = np.arange(0, found.bands.size + 1, shape.bands, dtype=np.int32)
            columns = [
                part.column(_ID),
                pa.ListArray.from_arrays(ends, found.shingles.view(np.int64)),
                pa.ListArray.from_arrays(wide, found.bands.view(np.int64).ravel()),
            ]
            yield pa.RecordBatch.from_arrays(columns, [_ID, _SHINGLES, _BANDS])


def candidates(sketched: DataFrame, bands: Counter) -> DataFrame:
    """Return the pairs `a` and `b`, each once, of examples that share a band.

    Args:
        sketched: `id`, `shingles` and `bands` of each example.
        bands: learns the size of the largest band.
    """
    band = sf.explode(_BANDS).alias("band")
    shared = sketched.select(_ID, band).groupBy("band").agg(sf.collect_list(_ID).alias("ids"))
    shared = bands.watch(shared, largest=sf.max(sf.size("ids")))
    met = shared.where(sf.size("ids") > 1).select(sf.slice(sf.array_sort("ids"), 1, _BAND).alias("ids"))
    each = met.select("ids", sf.posexplode("ids").alias("place", "b"))
    place = sf.col("place")
    before = sf.slice("ids", sf.greatest(place - _BEFORE, sf.lit(0)) + 1, sf.least(place, sf.lit(_BEFORE)))
    others = sf.array_union(sf.slice("ids", 1, sf.least(place, sf.lit(_FIRST))), before)
    return each.select(sf.explode(others).alias("a"), "b").distinct()


def verified(pairs: DataFrame, sketched: DataFrame, threshold: float) -> DataFrame:
    """Return the pairs whose sets of shingles are similar enough."""
    one, other = (
        sketched.select(sf.col(_ID).alias(name), sf.col(_SHINGLES).alias(f"{name}_shingles")) for name in "ab"
    )
    both = pairs.join(one, "a").join(other, "b")
    shared = sf.size(sf.array_intersect("a_shingles", "b_shingles"))
    either = sf.size("a_shingles") + sf.size("b_shingles") - shared
    return both.where(shared >= sf.lit(threshold) * either).select("a", "b")


def _clustered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each example of a cluster with the least id of its cluster.

    NB: it runs in one worker, which holds all similar pairs: about 100 bytes for each.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    held = list(batches)
    if not held:
        return
    table = pa.Table.from_batches(held)
    ids = pc.unique(pa.chunked_array([*table["a"].chunks, *table["b"].chunks], pa.string()))
    ids = ids.take(pc.sort_indices(ids))
    one, other = (pc.index_in(table[name], ids).to_numpy().astype(np.int64) for name in "ab")
    first = components(one, other, len(ids))
    yield pa.RecordBatch.from_arrays([ids, ids.take(pa.array(first))], [_ID, _FIRST_ID])


def components(one: Longs, other: Longs, size: int) -> Longs:
    """Return, for each of `size` nodes, the least node that the edges (one, other) connect it with."""
    label: Longs = np.arange(size)
    while True:
        before = label
        label = before.copy()
        np.minimum.at(label, one, before[other])
        np.minimum.at(label, other, before[one])
        # A label also moves to its own label: paths shrink by half each time.
        np.minimum.at(label, before, label)
        label = label[label]
        if np.array_equal(label, before):
            return label
