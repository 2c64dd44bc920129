"""Replaces values that patterns find in the texts of examples with placeholders, and counts them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, IntegerType, StructField, StructType

from finetune_trainer.examples import chat_messages
from finetune_trainer.prep.steps.patterns import PATTERNS, replace_values, sort_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from finetune_crds.cleaning import RedactKind
    from finetune_trainer.prep.plan import Form
    from finetune_trainer.prep.steps.patterns import Pattern

    # The number of replaced values of each row, by kind, in the order in which kinds are replaced.
    Counts = dict[RedactKind, npt.NDArray[np.int32]]


# The field of a message that holds JSON text.
_CALLS = "tool_calls"


def redact_columns(frame: DataFrame, form: Form, kinds: Sequence[RedactKind]) -> DataFrame:
    """Return the frame with placeholders in the columns of an example, and a column for each kind with the number of replaced values.

    Args:
        frame: rows whose example columns have texts, or conversations as `conversations.parse` returns them, or booleans, which do not
            change.
    """
    ordered = sort_kinds(kinds)
    counts = [StructField(_count_column(kind), IntegerType(), nullable=False) for kind in ordered]
    schema = StructType([*frame.schema.fields, *counts])
    columns = tuple(name for name in form.content if not isinstance(frame.schema[name].dataType, BooleanType))
    redacting = partial(_redact_batches, columns=columns, tools=form.tools, kinds=ordered)
    return frame.mapInArrow(redacting, schema)


def totals(kinds: Sequence[RedactKind]) -> dict[str, Column]:
    """Return the numbers of replaced values in a frame, by kind."""
    return {kind: sf.coalesce(sf.sum(_count_column(kind)), sf.lit(0)) for kind in kinds}


def _count_column(kind: RedactKind) -> str:
    return f"__finetune_redacted_{kind}"


def _redact_batches(
    batches: Iterable[pa.RecordBatch],
    *,
    columns: tuple[str, ...],
    tools: str | None,
    kinds: list[RedactKind],
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        counts: Counts = {kind: np.zeros(batch.num_rows, np.int32) for kind in kinds}
        redacted_columns = {
            name: _redact_column(batch.column(name), counts, is_json=name == tools) for name in columns
        }
        arrays = [redacted_columns.get(name, batch.column(name)) for name in batch.schema.names]
        numbers = [pa.array(counts[kind]) for kind in kinds]
        names = [*batch.schema.names, *map(_count_column, kinds)]
        yield pa.RecordBatch.from_arrays([*arrays, *numbers], names)


def _redact_column(column: pa.Array, counts: Counts, *, is_json: bool) -> pa.Array:
    """Return a column of texts, JSON or conversations with placeholders, and add the number of replaced values of each row to `counts`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(column.type):
        return _redact_texts(column, np.arange(len(column)), counts, is_json=is_json)
    # All messages of all rows, and the row of each message.
    messages, rows = column.flatten(), pc.list_parent_indices(column).to_numpy()
    fields = [messages.field(index) for index in range(messages.type.num_fields)]
    for name in ("content", "name", *chat_messages.REASONING, _CALLS):
        field_index = messages.type.get_field_index(name)
        if field_index >= 0:
            fields[field_index] = _redact_texts(fields[field_index], rows, counts, is_json=name == _CALLS)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    redacted_messages = pa.StructArray.from_arrays(
        fields, fields=list(messages.type), mask=messages.is_null()
    )
    return pa.ListArray.from_arrays(offsets, redacted_messages, type=column.type, mask=column.is_null())


def _redact_texts(
    texts: pa.Array, rows: npt.NDArray[np.int64], counts: Counts, *, is_json: bool = False
) -> pa.Array:
    """Return texts with placeholders; `rows` has the row number of each text."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # NB: most texts have no matches, and are not converted to Python strings.
    hinted = {kind: pc.match_substring_regex(texts, PATTERNS[kind].hint).to_pylist() for kind in counts}
    hinted_places = {place for hints in hinted.values() for place, has_hint in enumerate(hints) if has_hint}
    replace = _replace_in_json if is_json else replace_values
    # The changed texts, by place. NB: the places are visited in ascending order, in which `replace_with_mask` takes the texts.
    changed: dict[int, str] = {}
    for place in sorted(hinted_places):
        for kind, row_counts in counts.items():
            if not hinted[kind][place]:
                continue
            # With the placeholders of the kinds before this one.
            original = changed.get(place) or texts[place].as_py()
            text, count = replace(original, PATTERNS[kind])
            if count:
                changed[place] = text
                row_counts[rows[place]] += count
    mask = np.zeros(len(texts), bool)
    mask[list(changed)] = True
    return pc.replace_with_mask(texts, mask, pa.array(changed.values(), texts.type)) if changed else texts


def _replace_in_json(text: str, pattern: Pattern) -> tuple[str, int]:
    """Replace values in the strings and numbers of JSON, which stays JSON, or in text that is not JSON."""
    count = 0

    def replace_in_value(value: str) -> str:
        nonlocal count
        redacted, number = replace_values(value, pattern)
        count += number
        return redacted

    try:
        redacted_json = chat_messages.with_texts(text, replace_in_value)
    except ValueError:
        return replace_values(text, pattern)
    return (redacted_json, count) if count else (text, 0)
