"""Mixes several sources: each contributes its share of rows, selected by a hash. A column holds the name of each row's source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import AtomicType

from finetune_crds.data import COLUMN_FIELDS, Columns
from finetune_trainer.examples import chat_messages
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import reader
from finetune_trainer.prep.steps import conversations, labels, margins, steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from finetune_crds.source import MixedSource
    from finetune_trainer.prep.plan import Form

_BUCKETS = 2**32


@dataclass(frozen=True)
class Part:
    """A source of a mix: its rows, and the columns that hold an example."""

    source: MixedSource
    frame: DataFrame
    columns: Columns


def unify_columns(parts: Sequence[Part], templates: Sequence[str]) -> tuple[list[Part], Columns]:
    """Return the parts with the same names for the columns of an example, and these columns.

    Raises:
        DataError: the columns differ and cannot be renamed: the parts hold examples of different types, or there are templates, which
            name columns.
    """
    first = parts[0].columns
    if all(part.columns == first for part in parts):
        return list(parts), first
    if templates or any(part.columns.type != first.type for part in parts):
        differences = "; ".join(
            f"{part.source.name} has {' and '.join(part.columns.column_names)}" for part in parts
        )
        raise DataError(
            "ColumnsDiffer",
            f"the sources of the mix have different example columns: {differences}; set data.columns to columns that "
            "all of them have, or prepare them separately",
        )
    tools = "tools" if any(part.columns.tools for part in parts) else None
    columns = Columns(type=first.type, tools=tools)
    return [_rename_columns(part, columns) for part in parts], columns


def _rename_columns(part: Part, columns: Columns) -> Part:
    """Return a part whose columns have the default names of their type. Other columns with these names are dropped."""
    # The new name of each column to rename, for example {"conversations": "messages"}. A column of tools needs no new name: only a column
    # named `tools` is detected.
    names = {getattr(part.columns, field): field for field in COLUMN_FIELDS[columns.type]}
    # The columns with the values as the source wrote them are renamed too.
    names |= {plain_text.written(name): plain_text.written(field) for name, field in names.items()}
    columns_to_keep = [name for name in part.frame.columns if name in names or name not in names.values()]
    frame = part.frame.select(
        *(sf.col(quoted(name)).alias(names.get(name, name)) for name in columns_to_keep)
    )
    if columns.tools and not part.columns.tools:
        frame = frame.withColumn(columns.tools, sf.lit(None).cast("string"))
    return replace(part, frame=frame, columns=columns)


def find_conversations(parts: Sequence[Part], columns: Columns) -> dict[str, tuple[str, ...]]:
    """Return the columns that hold lists of {role, content} in a part, each with the other fields of messages that are kept.

    Raises:
        DataError: a column of a preference holds conversations in some parts, and text in others.
    """
    # For each part, the kept fields by column.
    carried_fields = [reader.find_conversations(part.frame, columns.message_weight) for part in parts]
    # Columns that hold conversations in some parts, but not in all.
    differing = [
        name
        for name in columns.column_names
        if 0 < sum(name in part_fields for part_fields in carried_fields) < len(carried_fields)
    ]
    # Only preferences must agree: a column of messages may have lists in some parts and JSON text in others, and both are read.
    if columns.messages is None and differing:
        column_name, *_ = differing
        differences = "; ".join(
            f"{part.source.name} has {'conversations' if column_name in part_fields else 'text'}"
            for part, part_fields in zip(parts, carried_fields, strict=True)
        )
        raise DataError(
            "ColumnsDiffer",
            (
                f"column {column_name} has different types in the sources of the mix ({differences}): prepare these sources "
                "separately"
            ),
        )
    fields_by_column = {}
    for name in columns.column_names:
        if any(name in part_fields for part_fields in carried_fields):
            # If a part has no lists in the column, its JSON text may have any of the fields.
            fields = {
                field
                for part_fields in carried_fields
                for field in part_fields.get(name, chat_messages.CARRIED)
            }
            fields_by_column[name] = tuple(field for field in chat_messages.CARRIED if field in fields)
    return fields_by_column


def mix_parts(parts: Sequence[Part], form: Form, seed: int) -> DataFrame:
    """Sample each part to its share, and return the rows of all parts, with the column `steps.MIXED_FROM`.

    All rows of the part with the fewest rows for its weight are taken. A column that a part does not have is null in its rows.
    Counting the rows of the parts takes a pass over them.

    Raises:
        DataError: a part has no rows.
    """
    frames = [_parse(part.frame, form) for part in parts]
    counts = _count_rows(frames)
    for part, count in zip(parts, counts, strict=True):
        if not count:
            raise DataError(
                "NoRows", f"{part.source.address}, source {part.source.name} of the mix, has no rows"
            )
    sampled = [
        _sample(frame, form, share, f"{seed}|mix|{part.source.name}").withColumn(
            steps.MIXED_FROM, sf.lit(part.source.name)
        )
        for part, frame, share in zip(parts, frames, compute_shares(parts, counts), strict=True)
    ]
    return _union(sampled)


def _count_rows(frames: Sequence[DataFrame]) -> list[int]:
    """Count the rows of each frame, all in one pass."""
    parts = (frame.select(sf.lit(number).alias("part")) for number, frame in enumerate(frames))
    counts = reduce(lambda union, part: union.union(part), parts).groupBy("part").count().collect()
    rows_by_part = {row["part"]: row["count"] for row in counts}
    return [rows_by_part.get(number, 0) for number in range(len(frames))]


def _parse(frame: DataFrame, form: Form) -> DataFrame:
    """Parse conversations, tools, labels and margins, whose types may differ between the sources."""
    frame = conversations.parse(frame, form)
    frame = conversations.with_tools(frame, form)
    return margins.with_margins(labels.with_labels(frame, form), form)


def compute_shares(parts: Sequence[Part], counts: Sequence[int]) -> list[float]:
    """Return the share of its rows that each part contributes.

    For example, parts of 100 and 400 rows with the weights 1 and 2 contribute the shares 1.0 and 0.5: 100 and 200 rows.
    """
    weights = [part.source.weight for part in parts]
    # The rows for a weight of 1.
    scale = min(count / weight for count, weight in zip(counts, weights, strict=True))
    return [weight * scale / count for count, weight in zip(counts, weights, strict=True)]


def _sample(frame: DataFrame, form: Form, share: float, salt: str) -> DataFrame:
    """Return a share of the rows, chosen by a hash of the salt and their texts."""
    if share >= 1:
        return frame
    bucket = sf.pmod(sf.xxhash64(sf.lit(salt), *steps.texts(form)), sf.lit(_BUCKETS))
    return frame.where(bucket < sf.lit(round(share * _BUCKETS)))


def _union(frames: list[DataFrame]) -> DataFrame:
    """Return the rows of all frames. A column with several types becomes text, or is dropped if it cannot become text."""
    types_by_column: dict[str, list[DataType]] = {}
    for frame in frames:
        for field in frame.schema.fields:
            types_by_column.setdefault(field.name, []).append(field.dataType)
    same = {name for name, types in types_by_column.items() if all(kind == types[0] for kind in types)}
    atomic = {
        name for name, types in types_by_column.items() if all(isinstance(kind, AtomicType) for kind in types)
    }

    def align(frame: DataFrame) -> DataFrame:
        return frame.select(
            *(
                sf.col(quoted(name)) if name in same else plain_text.text_of(frame, name).alias(name)
                for name in frame.columns
                if name in same or name in atomic
            )
        )

    return reduce(lambda union, part: union.unionByName(part, allowMissingColumns=True), map(align, frames))
