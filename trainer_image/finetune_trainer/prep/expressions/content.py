"""Contents of messages as text, as Spark expressions: a content may be a list of parts, as clients of OpenAI send it."""

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
_CONTENTS = ("content", FIELDS["content"])
# Shapes of a content in JSON text, other than text, each with the pattern of its beginning: a list of parts, each a text or the JSON
# text of an object; or one part.
_SHAPES: tuple[tuple[str, DataType], ...] = ((r"\[", ArrayType(StringType())), (r"\{", _PART))
PARSER = {"maxStringLen": str(2**31 - 1)}
"""Settings of Spark's parser of JSON. NB: its default limits a text to 20 million characters."""


def is_conversation(kind: DataType) -> bool:
    """Whether values are lists of messages."""
    return (
        isinstance(kind, ArrayType)
        and isinstance(kind.elementType, StructType)
        and are_fields_of_messages(kind.elementType.fieldNames())
    )


def text_of(turn: Column, kind: StructType, *, only_texts: bool = False) -> Column:
    """Return the content of a message as text; the field is named `content` or `value`.

    Args:
        only_texts: leave out parts that are not text.
    """
    kinds = {field.name: field.dataType for field in kind.fields}
    names = [name for name in _CONTENTS if name in kinds]
    return sf.coalesce(*(join_parts(turn[name], kinds[name], only_texts=only_texts) for name in names))


def join_parts(parts: Column, kind: DataType, *, only_texts: bool = False) -> Column:
    """Return a content as text; the texts of several parts are joined.

    A content with a part that is not text becomes a text that `chat_messages.messages` refuses.

    Args:
        only_texts: leave out parts that are not text.
    """
    if isinstance(kind, StructType | MapType):
        return join_parts(sf.when(parts.isNotNull(), sf.array(parts)), ArrayType(kind), only_texts=only_texts)
    if not isinstance(kind, ArrayType):
        text = plain_text.write(parts, kind)
        # A content that was joined before is a text, which may begin with OTHER_PART.
        return sf.regexp_replace(text, rf"^{OTHER_PART}[^\x00]*\x00", "") if only_texts else text
    if isinstance(kind.elementType, StructType | MapType):
        names = kind.elementType.fieldNames() if isinstance(kind.elementType, StructType) else [_TYPE, _TEXT]
        split = sf.transform(parts, lambda part: _as_part(part, names))
    else:
        split = sf.transform(parts.cast("array<string>"), _parse_part)

    def join(split: Column) -> Column:
        # NB: array_join leaves out nulls, and so the parts that are not text.
        texts = sf.transform(split, lambda part: sf.when(part[_TYPE] == TEXT_PART, part[_TEXT]))
        joined = sf.array_join(texts, BETWEEN_PARTS)
        if only_texts:
            return joined
        other_parts = sf.filter(split, lambda part: (part[_TYPE] != TEXT_PART) | part[_TEXT].isNull())
        refused = sf.concat(sf.lit(OTHER_PART), other_parts[0][_TYPE], sf.lit("\0"), joined)
        return sf.when(sf.size(other_parts) > 0, refused).otherwise(joined)

    return sf.when(parts.isNotNull(), plain_text.evaluate_once(split, join))


def parse_conversations(text: Column, kind: DataType) -> Column:
    """Parse the JSON text of conversations; text that is not a list of messages becomes null.

    Args:
        kind: a list of structures. All their fields become text; lists and structures other than the content become JSON text
            that keeps the numbers as they are written.
    """
    assert isinstance(kind, ArrayType)  # noqa: S101 - conversations are
    assert isinstance(kind.elementType, StructType)  # noqa: S101
    names = kind.elementType.fieldNames()
    exact = _parse(plain_text.mark_numbers(text), names, plain_text.unmark_numbers)
    return sf.when(plain_text.has_fractions(text), exact).otherwise(_parse(text, names, lambda value: value))


def _parse(text: Column, names: list[str], finish: Callable[[Column], Column]) -> Column:
    """Parse conversations with these fields. Each field becomes text, to which `finish` is applied."""
    contents = [name for name in _CONTENTS if name in names]
    shapes = {f"shape{number}": shape for number, (_, shape) in enumerate(_SHAPES)}
    # NB: most contents are text: only conversations that may have another shape are parsed again.
    other_columns = (
        sf.when(
            reduce(or_, (text.rlike(rf'"{name}"\s*:\s*{beginning}') for name in contents)),
            sf.from_json(text, _list_of(contents, shape), PARSER),
        )
        for beginning, shape in _SHAPES
    )
    turns = sf.from_json(text, _list_of(names, StringType()), PARSER)
    columns = zip(("turns", *shapes), (turns, *other_columns), strict=True)

    def read_field(parsed: Column, turn: Column, name: str, number: Column) -> Column:
        if name not in contents:
            return finish(turn[name]).alias(name)
        joined = [
            join_parts(sf.get(parsed[parsed_name], number)[name], shape)
            for parsed_name, shape in shapes.items()
        ]
        return finish(sf.coalesce(*joined, turn[name])).alias(name)

    def read_turns(parsed: Column) -> Column:
        return sf.transform(
            parsed["turns"],
            lambda turn, number: sf.struct(*(read_field(parsed, turn, name, number) for name in names)),
        )

    # NB: the text is parsed outside of the lambda: an expression inside it is evaluated for each message.
    return plain_text.evaluate_once(sf.struct(*(column.alias(name) for name, column in columns)), read_turns)


def _list_of(names: list[str], kind: DataType) -> ArrayType:
    return ArrayType(StructType([StructField(name, kind) for name in names]))


def _as_part(part: Column, names: list[str]) -> Column:
    kind = sf.coalesce(part[_TYPE].cast("string"), sf.lit(TEXT_PART)) if _TYPE in names else sf.lit(TEXT_PART)
    text = part[_TEXT].cast("string") if _TEXT in names else sf.lit(None).cast("string")
    return sf.struct(kind.alias(_TYPE), text.alias(_TEXT))


def _parse_part(part: Column) -> Column:
    """Parse a part in JSON text: an object with a type or a text; any other part is itself the text."""

    def read(parsed: Column) -> Column:
        is_object = parsed[_TYPE].isNotNull() | parsed[_TEXT].isNotNull()
        return sf.struct(
            sf.coalesce(parsed[_TYPE], sf.lit(TEXT_PART)).alias(_TYPE),
            sf.when(is_object, parsed[_TEXT]).otherwise(part).alias(_TEXT),
        )

    return plain_text.evaluate_once(sf.when(part.startswith("{"), sf.from_json(part, _PART, PARSER)), read)
