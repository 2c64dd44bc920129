"""Removes near duplicates: MinHash finds pairs to compare; a pair counts if its exact Jaccard similarity reaches the threshold.

Text that many examples share is ignored, see `boilerplate`. Which examples stay depends only on their texts and ids, never on
partitions or order.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyspark.sql import functions as sf

from finetune_trainer.prep.plan import LABEL
from finetune_trainer.prep.spark.counter import Counter
from finetune_trainer.prep.spark.keep import keep
from finetune_trainer.prep.steps.boilerplate import find_boilerplate
from finetune_trainer.prep.steps.sketch import choose_banding, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import ExitStack

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from finetune_crds.prepare import NearDedupe
    from finetune_trainer.prep.steps.sketch import Banding, Boilerplate

    Longs = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

TEXT = "plain"
"""Column with the text that is compared: what is said in an example, in lower case, its white space folded."""
MAX_PAIRS = 100_000
"""Maximum number of reported pairs: the pairs whose removed examples have the least ids."""
_ID = "id"
# _FIRST_ID is the least id of a cluster: the id of the example that stays.
_SHINGLES, _BANDS, _FIRST_ID = "shingles", "bands", "first"
_SKETCH_SCHEMA = f"{_ID} string, {_SHINGLES} array<bigint>, {_BANDS} array<bigint>"
_CLOSEST_ID, _SIMILARITY, _BEGINNING = "closest", "similarity", "beginning"
_CLUSTER_SCHEMA = f"{_ID} string, {_FIRST_ID} string, {_CLOSEST_ID} string, {_SIMILARITY} double"
# Each example of a band (`sketch.Banding`) is compared with the first examples of the band, and with the examples just before it. So
# the number of pairs grows with the number of examples, not with its square.
_MAX_FIRST_PARTNERS, _MAX_PRECEDING_PARTNERS = 8, 8
# Maximum number of examples of one band that are compared, those with the least ids; `Clusters.crowded` reports a larger band.
_MAX_BAND_SIZE = 50_000
# Separates the bands of bad answers from the bands of good answers.
_BAD_ANSWER_MASK = np.uint64(0x9E3779B97F4A7C15)
# So few that the hashes of a batch fit into the processor's cache.
_TEXTS_PER_BATCH = 500


class Pair(NamedTuple):
    """A removed example, and the example of its cluster that is most similar to it.

    removed: the id of the removed example.
    closest: the id of the most similar example.
    similarity: the Jaccard similarity of the two.
    kept: the id of the example of the cluster that stays.
    text, closest_text: the beginnings of the removed and of the closest example, if texts are shown.
    """

    removed: str
    closest: str
    similarity: float
    kept: str
    text: str = ""
    closest_text: str = ""


class Source(NamedTuple):
    """The number of examples of a source before near duplicates are removed, and the number of removed examples."""

    examples: int
    dropped: int


class Clusters(NamedTuple):
    """Near duplicates.

    sizes: number of clusters by their size, for example {2: 130, 3: 7}.
    sources: counts by the name of the source, which is empty if there is one source.
    pairs: the pairs of the removed examples.
    crowded: the number of examples of the largest band, if it has more than are compared; else 0.
    """

    sizes: dict[int, int]
    sources: dict[str, Source]
    pairs: list[Pair]
    crowded: int = 0

    @property
    def dropped(self) -> int:
        """Examples that are removed."""
        return sum((size - 1) * clusters for size, clusters in self.sizes.items())

    @property
    def warnings(self) -> list[str]:
        """A warning if more than half of the examples of a source are removed, or one cluster loses more than half of all examples."""
        examples = sum(source.examples for source in self.sources.values())
        largest = max(self.sizes, default=1)
        sentences = [
            f"dedupe.near drops {source.dropped:,} of {source.examples:,} examples{f' of source {name}' if name else ''}"
            for name, source in self.sources.items()
            if 2 * source.dropped > source.examples
        ]
        # One example of the cluster stays.
        if 2 * (largest - 1) > examples:
            sentences.append(f"one cluster of near duplicates has {largest:,} of {examples:,} examples")
        if not sentences:
            return []
        return [f"{'; '.join(sentences)}: check the pairs in the report, and raise dedupe.near.threshold"]


def remove_near_duplicates(
    frame: DataFrame,
    near_dedupe: NearDedupe,
    kept_frames: ExitStack,
    characters: int = 0,
    source: str | None = None,
) -> tuple[DataFrame, Clusters]:
    """Return the frame without near duplicates and without the column of the compared text, and the clusters.

    Of each cluster, the example with the least id stays.

    Args:
        frame: examples with distinct ids, and labels if they have any. It is read several times.
        kept_frames: when it closes, it releases what the returned frame needs.
        characters: how many characters of the texts of a pair are reported.
        source: the column with the source of an example, in a mix.
    """
    banding = choose_banding(near_dedupe.threshold)
    source_name = sf.col(source) if source else sf.lit("")
    examples = {
        row["source"]: row["count"] for row in frame.groupBy(source_name.alias("source")).count().collect()
    }
    boilerplate = find_boilerplate(frame, TEXT, sum(examples.values()))
    texts = frame.select(_ID, TEXT, *([LABEL] if LABEL in frame.columns else []))
    sketched = texts.mapInArrow(
        partial(_sketch_batches, banding=banding, boilerplate=boilerplate), _SKETCH_SCHEMA
    )
    sketched = keep(sketched, kept_frames)
    bands = Counter("bands")
    pairs = verify_pairs(find_candidates(sketched, bands), sketched, near_dedupe.threshold)
    members = pairs.repartition(1).mapInArrow(_cluster_pairs, _CLUSTER_SCHEMA)
    members = keep(members, kept_frames)
    duplicates = members.where(sf.col(_ID) != sf.col(_FIRST_ID))
    sizes = _count_by_size(members)
    dropped = (
        _count_by_source(frame, duplicates, source_name)
        if source
        else {"": sum((size - 1) * clusters for size, clusters in sizes.items())}
    )
    sources = {name: Source(number, dropped.get(name, 0)) for name, number in sorted(examples.items())}
    # NB: rows that count twice because an executor was lost cannot change a maximum, so it need not be counted again.
    largest_band = bands.read(again=False)["largest"] or 0
    crowded = largest_band if largest_band > _MAX_BAND_SIZE else 0
    clusters = Clusters(sizes, sources, _list_pairs(frame, duplicates, characters), crowded)
    return frame.drop(TEXT).join(duplicates.select(_ID), _ID, "left_anti"), clusters


def describe(clusters: Clusters) -> str:
    """Return the clusters as a line of the log."""
    crowd = f"; {describe_crowd(clusters.crowded)}" if clusters.crowded else ""
    if not clusters.sizes:
        return f"near duplicates: none{crowd}"
    cluster_count = sum(clusters.sizes.values())
    stays = "stays" if cluster_count == 1 else "stay"
    return (
        f"near duplicates: {cluster_count + clusters.dropped:,} examples, of which {cluster_count:,} {stays}; the largest cluster has "
        f"{max(clusters.sizes):,}{crowd}"
    )


def describe_pair(pair: Pair) -> str:
    """Return a pair as a sample."""
    return f"{pair.text}\n\nlike ({pair.similarity:.2f}):\n{pair.closest_text}"


def describe_crowd(examples: int) -> str:
    """Return a sentence about examples that were not compared; `examples`: the number of examples of the largest band."""
    return (
        f"up to {examples:,} examples share part of their text; only {_MAX_BAND_SIZE:,} of them are compared with "
        "each other"
    )


def _count_by_size(members: DataFrame) -> dict[int, int]:
    """Return the number of clusters, by size."""
    sizes = members.groupBy(_FIRST_ID).agg(sf.count(sf.lit(1)).alias("size")).groupBy("size").count()
    return dict(sorted((row["size"], row["count"]) for row in sizes.collect()))


def _count_by_source(frame: DataFrame, duplicates: DataFrame, source_name: Column) -> dict[str, int]:
    """Return the number of dropped examples, by source."""
    dropped = frame.select(_ID, source_name.alias("source")).join(duplicates.select(_ID), _ID, "left_semi")
    return {row["source"]: row["count"] for row in dropped.groupBy("source").count().collect()}


def _list_pairs(frame: DataFrame, duplicates: DataFrame, characters: int) -> list[Pair]:
    """Return the pairs to report, with the beginnings of their texts unless `characters` is 0."""
    reported = duplicates.orderBy(_ID).limit(MAX_PAIRS)
    pairs = [
        Pair(row[_ID], row[_CLOSEST_ID], round(row[_SIMILARITY], 4), row[_FIRST_ID])
        for row in reported.collect()
    ]
    if not characters or not pairs:
        return pairs
    ids = reported.select(_ID).union(reported.select(_CLOSEST_ID)).distinct()
    beginnings = frame.select(_ID, sf.substring(TEXT, 1, characters).alias(_BEGINNING)).join(
        ids, _ID, "left_semi"
    )
    texts = {row[_ID]: row[_BEGINNING] for row in beginnings.collect()}
    return [pair._replace(text=texts[pair.removed], closest_text=texts[pair.closest]) for pair in pairs]


def _sketch_batches(
    batches: Iterable[pa.RecordBatch], *, banding: Banding, boilerplate: Boilerplate
) -> Iterator[pa.RecordBatch]:
    """Yield the sketches of examples that have words."""
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _TEXTS_PER_BATCH):
            part = batch.slice(start, _TEXTS_PER_BATCH)
            sketches = sketch(part.column(TEXT).to_pylist(), banding, boilerplate)
            if LABEL in part.schema.names:
                # Examples with different labels are not duplicates.
                is_bad = ~part.column(LABEL).to_numpy(zero_copy_only=False).astype(bool)
                sketches.bands[is_bad] ^= _BAD_ANSWER_MASK
            shingle_offsets = np.append(0, sketches.ends).astype(np.int32)
            band_offsets = np.arange(0, sketches.bands.size + 1, banding.bands, dtype=np.int32)
            columns = [
                part.column(_ID),
                pa.ListArray.from_arrays(shingle_offsets, sketches.shingles.view(np.int64)),
                pa.ListArray.from_arrays(band_offsets, sketches.bands.view(np.int64).ravel()),
            ]
            sketched_batch = pa.RecordBatch.from_arrays(columns, [_ID, _SHINGLES, _BANDS])
            yield sketched_batch.filter(pa.array(np.diff(shingle_offsets) > 0))


def find_candidates(sketched: DataFrame, bands: Counter) -> DataFrame:
    """Return the pairs of examples to compare, each once, as the ids `a` and `b`.

    The examples of a pair share a band. Of a large band, not all pairs are compared, see `_MAX_FIRST_PARTNERS` and `_MAX_BAND_SIZE`.

    Args:
        sketched: `id`, `shingles` and `bands` of each example.
        bands: counts the size of the largest band.
    """
    band = sf.explode(_BANDS).alias("band")
    shared = sketched.select(_ID, band).groupBy("band").agg(sf.collect_list(_ID).alias("ids"))
    shared = bands.watch(shared, largest=sf.max(sf.size("ids")))
    compared = shared.where(sf.size("ids") > 1).select(
        sf.slice(sf.array_sort("ids"), 1, _MAX_BAND_SIZE).alias("ids")
    )
    members = compared.select("ids", sf.posexplode("ids").alias("place", "b"))
    # For example, at place 10 `before` has the ids at the places 2 to 9, and `partners` also those at 0 and 1. `place` counts from 0,
    # `slice` from 1.
    place = sf.col("place")
    before = sf.slice(
        "ids",
        sf.greatest(place - _MAX_PRECEDING_PARTNERS, sf.lit(0)) + 1,
        sf.least(place, sf.lit(_MAX_PRECEDING_PARTNERS)),
    )
    partners = sf.array_union(sf.slice("ids", 1, sf.least(place, sf.lit(_MAX_FIRST_PARTNERS))), before)
    return members.select(sf.explode(partners).alias("a"), "b").distinct()


def verify_pairs(pairs: DataFrame, sketched: DataFrame, threshold: float) -> DataFrame:
    """Return the pairs whose sets of shingles are similar enough, with their Jaccard similarity."""
    first, second = (
        sketched.select(sf.col(_ID).alias(name), sf.col(_SHINGLES).alias(f"{name}_shingles")) for name in "ab"
    )
    both = pairs.join(first, "a").join(second, "b")
    shared = sf.size(sf.array_intersect("a_shingles", "b_shingles"))
    union_size = sf.size("a_shingles") + sf.size("b_shingles") - shared
    counted = both.select("a", "b", shared.alias("shared"), union_size.alias("either"))
    verified = counted.where(sf.col("shared") >= sf.lit(threshold) * sf.col("either"))
    return verified.select("a", "b", (sf.col("shared") / sf.col("either")).alias(_SIMILARITY))


def _cluster_pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each example of a cluster, with the least id of the cluster and the id of the most similar example.

    NB: it runs in one worker, which holds all similar pairs: about 120 bytes for each.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    pair_batches = list(batches)
    if not pair_batches:
        return
    table = pa.Table.from_batches(pair_batches)
    ids = pc.unique(pa.chunked_array([*table["a"].chunks, *table["b"].chunks], pa.string()))
    ids = ids.take(pc.sort_indices(ids))
    starts, ends = (pc.index_in(table[name], ids).to_numpy().astype(np.int64) for name in "ab")
    first = find_components(starts, ends, len(ids))
    nearest, similarity = find_closest(starts, ends, table[_SIMILARITY].to_numpy(), len(ids))
    columns = [ids, ids.take(pa.array(first)), ids.take(pa.array(nearest)), pa.array(similarity)]
    yield pa.RecordBatch.from_arrays(columns, [_ID, _FIRST_ID, _CLOSEST_ID, _SIMILARITY])


def find_closest(starts: Longs, ends: Longs, similarity: Floats, size: int) -> tuple[Longs, Floats]:
    """Return, for each of `size` nodes, the most similar node at the other end of its edges, and the similarity.

    Of several equally similar nodes, the least one is returned. Each node must have an edge. For example, [1, 2, 1] and [0.8, 0.9, 0.9]
    for an edge of similarity 0.8 between the nodes 0 and 1, and one of 0.9 between 1 and 2.
    """
    nodes, neighbors = np.append(starts, ends), np.append(ends, starts)
    both = np.append(similarity, similarity)
    # Sorted by node, then by descending similarity, then by neighbor: the first edge of each node is the result.
    order = np.lexsort((neighbors, -both, nodes))
    best = order[np.searchsorted(nodes[order], np.arange(size))]
    return neighbors[best], both[best]


def find_components(starts: Longs, ends: Longs, size: int) -> Longs:
    """Return, for each of `size` nodes, the least node that edges from `starts` to `ends` connect it with.

    For example, [0, 1, 1, 3, 1] for five nodes with edges between 1 and 2 and between 2 and 4.
    """
    label: Longs = np.arange(size)
    while True:
        before = label
        label = before.copy()
        np.minimum.at(label, starts, before[ends])
        np.minimum.at(label, ends, before[starts])
        # The node that was a node's label gets that node's new label, if that is less.
        np.minimum.at(label, before, label)
        # Each label is replaced by the label of the node that it names. This halves the paths each time.
        label = label[label]
        if np.array_equal(label, before):
            return label
