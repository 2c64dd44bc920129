"""Spark expressions that turn the content of a message into text.

A content is text, or a list of parts as in the API of OpenAI: `{"type": "text", "text": "..."}`.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

from finetune_trainer.examples.chat_messages import (
    BETWEEN_PARTS,
    FIELDS,
    OTHER_PART,
    TEXT_PART,
    are_fields_of_messages,
)
from finetune_trainer.prep.expressions import plain_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column
    from pyspark.sql.types import DataType

_TYPE, _TEXT = "type", "text"
_PART = StructType([StructField(name, StringType()) for name in (_TYPE, _TEXT)])
# A message has its content in a field with one of these names.
_CONTENTS = ("content", FIELDS["content"])
# For each shape of a content that is not text, the pattern with which it begins in JSON text, and its type. The shapes are a list of parts,
# each a text or the JSON text of an object; and one part.
_SHAPES: tuple[tuple[str, DataType], ...] = ((r"\[", ArrayType(StringType())), (r"\{", _PART))
PARSER = {"maxStringLen": str(2**31 - 1)}
"""Settings of Spark's parser of JSON. NB: its default limits a text to 20 million characters."""


def is_conversation(kind: DataType) -> bool:
    """Whether values of a type are lists of messages."""
    return (
        isinstance(kind, ArrayType)
        and isinstance(kind.elementType, StructType)
        and are_fields_of_messages(kind.elementType.fieldNames())
    )


def text_of(message: Column, kind: StructType, *, only_texts: bool = False) -> Column:
    """Return the content of a message as text; the field is named `content` or `value`.

    Args:
        only_texts: leave out parts that are not text.
    """
    kinds = {field.name: field.dataType for field in kind.fields}
    names = [name for name in _CONTENTS if name in kinds]
    return sf.coalesce(*(join_parts(message[name], kinds[name], only_texts=only_texts) for name in names))


def join_parts(parts: Column, kind: DataType, *, only_texts: bool = False) -> Column:
    """Return a content as text; the texts of several parts are joined.

    Without `only_texts`, a content with a part that is not text becomes OTHER_PART, the type of that part, a NUL and the joined texts.
    `chat_messages.messages` refuses a text that begins with OTHER_PART.

    Args:
        parts: the content.
        only_texts: leave out parts that are not text.
    """
    if isinstance(kind, StructType | MapType):
        return join_parts(sf.when(parts.isNotNull(), sf.array(parts)), ArrayType(kind), only_texts=only_texts)
    if not isinstance(kind, ArrayType):
        text = plain_text.write(parts, kind)
        # An earlier `join_parts` may have written OTHER_PART, the type of the part and a NUL before the texts.
        return sf.regexp_replace(text, rf"^{OTHER_PART}[^\x00]*\x00", "") if only_texts else text
    if isinstance(kind.elementType, StructType | MapType):
        names = kind.elementType.fieldNames() if isinstance(kind.elementType, StructType) else [_TYPE, _TEXT]
        typed_parts = sf.transform(parts, lambda part: _as_part(part, names))
    else:
        typed_parts = sf.transform(parts.cast("array<string>"), _parse_part)

    def join(typed_parts: Column) -> Column:
        # NB: array_join leaves out nulls, and so the parts that are not text.
        texts = sf.transform(typed_parts, lambda part: sf.when(part[_TYPE] == TEXT_PART, part[_TEXT]))
        joined = sf.array_join(texts, BETWEEN_PARTS)
        if only_texts:
            return joined
        # A text part without a text is refused, too.
        other_parts = sf.filter(typed_parts, lambda part: (part[_TYPE] != TEXT_PART) | part[_TEXT].isNull())
        refused = sf.concat(sf.lit(OTHER_PART), other_parts[0][_TYPE], sf.lit("\0"), joined)
        return sf.when(sf.size(other_parts) > 0, refused).otherwise(joined)

    return sf.when(parts.isNotNull(), plain_text.evaluate_once(typed_parts, join))


def parse_conversations(text: Column, kind: DataType) -> Column:
    """Parse the JSON text of conversations; text that is not a list of messages becomes null.

    Args:
        kind: a type for which `is_conversation` holds. All fields of a message become text; lists and structures other than the
            content become JSON text, in which numbers stay as they are written.
    """
    assert isinstance(kind, ArrayType)  # noqa: S101 - see `is_conversation`
    assert isinstance(kind.elementType, StructType)  # noqa: S101
    names = kind.elementType.fieldNames()
    # NB: marks keep how numbers are written, but cost time: only a text that may have numbers with a point or an exponent is marked.
    exact = _parse(plain_text.mark_numbers(text), names, plain_text.unmark_numbers)
    return sf.when(plain_text.has_fractions(text), exact).otherwise(_parse(text, names, lambda value: value))


def _parse(text: Column, names: list[str], finish: Callable[[Column], Column]) -> Column:
    """Parse conversations with these fields. Each field becomes text, to which `finish` is applied."""
    contents = [name for name in _CONTENTS if name in names]
    shapes = {f"shape{number}": shape for number, (_, shape) in enumerate(_SHAPES)}
    # For each shape, the same conversations, parsed with contents of the shape; null if no content begins like the shape.
    # NB: most contents are text, so few conversations are parsed again.
    other_columns = (
        sf.when(
            reduce(or_, (text.rlike(rf'"{name}"\s*:\s*{beginning}') for name in contents)),
            sf.from_json(text, _list_of(contents, shape), PARSER),
        )
        for beginning, shape in _SHAPES
    )
    messages = sf.from_json(text, _list_of(names, StringType()), PARSER)
    columns = zip(("messages", *shapes), (messages, *other_columns), strict=True)

    # Below, `parsed` has the fields messages, shape0 and shape1: lists with the same messages at the same places. In `messages`, a content
    # that is not text is its JSON text; in the lists of the shapes, a content of another shape is null.
    def read_field(parsed: Column, message: Column, name: str, number: Column) -> Column:
        if name not in contents:
            return finish(message[name]).alias(name)
        joined = [
            join_parts(sf.get(parsed[shape_name], number)[name], shape)
            for shape_name, shape in shapes.items()
        ]
        return finish(sf.coalesce(*joined, message[name])).alias(name)

    def read_messages(parsed: Column) -> Column:
        return sf.transform(
            parsed["messages"],
            lambda message, number: sf.struct(*(read_field(parsed, message, name, number) for name in names)),
        )

    # NB: the text is parsed outside of the lambda: an expression inside it is evaluated for each message.
    return plain_text.evaluate_once(
        sf.struct(*(column.alias(name) for name, column in columns)), read_messages
    )


def _list_of(names: list[str], kind: DataType) -> ArrayType:
    return ArrayType(StructType([StructField(name, kind) for name in names]))


def _as_part(part: Column, names: list[str]) -> Column:
    """Return a structure or map, which has the fields `names`, as a _PART. A part without a type is text."""
    part_type = part[_TYPE].cast("string") if _TYPE in names else sf.lit(None)
    text = part[_TEXT].cast("string") if _TEXT in names else sf.lit(None).cast("string")
    return sf.struct(sf.coalesce(part_type, sf.lit(TEXT_PART)).alias(_TYPE), text.alias(_TEXT))


def _parse_part(part: Column) -> Column:
    """Parse a part in JSON text: an object with a type or a text; any other part is itself the text."""

    def read(parsed: Column) -> Column:
        is_object = parsed[_TYPE].isNotNull() | parsed[_TEXT].isNotNull()
        return sf.struct(
            sf.coalesce(parsed[_TYPE], sf.lit(TEXT_PART)).alias(_TYPE),
            sf.when(is_object, parsed[_TEXT]).otherwise(part).alias(_TEXT),
        )

    return plain_text.evaluate_once(sf.when(part.startswith("{"), sf.from_json(part, _PART, PARSER)), read)
