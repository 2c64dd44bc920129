"""Contents of messages as text, as Spark expressions: a content may be a list of parts, as clients of OpenAI send it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, AtomicType, MapType, StringType, StructField, StructType

from finetune_trainer.examples.chat_messages import (
    BETWEEN_PARTS,
    FIELDS,
    OTHER_PART,
    TEXT_PART,
    are_fields_of_messages,
)
from finetune_trainer.prep.expressions import plain_text

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

_TYPE, _TEXT = "type", "text"
_PART = StructType([StructField(name, StringType()) for name in (_TYPE, _TEXT)])
# The contents of JSON text that are lists; each part is the JSON text of an object, or a text.
_LISTS = ArrayType(StructType([StructField("content", ArrayType(StringType()))]))
# NB: most conversations have no such content, and need not be parsed for it.
_HAS_LIST = r'"content"\s*:\s*\['
# NB: Spark does not keep how a number is written where it parses a text.
_NUMBER = r'"content"\s*:\s*(-?[0-9][0-9.eE+-]*)'
# NB: without it a text may have 20 million characters.
_PARSER = {"maxStringLen": str(2**31 - 1)}
_CONTENTS = ArrayType(StructType([StructField("content", StringType())]))


def is_conversation(kind: DataType) -> bool:
    """Whether values are lists of messages."""
    return (
        isinstance(kind, ArrayType)
        and isinstance(kind.elementType, StructType)
        and are_fields_of_messages(kind.elementType.fieldNames())
    )


def has_plain_contents(kind: DataType) -> bool:
    """Whether values are conversations whose contents are text or numbers, or the JSON text of a list where a reader found several."""
    if not is_conversation(kind):
        return False
    assert isinstance(kind, ArrayType)  # noqa: S101 - conversations are
    assert isinstance(kind.elementType, StructType)  # noqa: S101
    return any(
        field.name == "content" and isinstance(field.dataType, AtomicType)
        for field in kind.elementType.fields
    )


def text_of(turn: Column, kind: StructType, *, only_texts: bool = False) -> Column:
    """Return the content of a message as text, whichever name its format has for it.

    Args:
        only_texts: leave out parts that are not text.
    """
    kinds = {field.name: field.dataType for field in kind.fields}
    names = [name for name in ("content", FIELDS["content"]) if name in kinds]
    return sf.coalesce(*(join_parts(turn[name], kinds[name], only_texts=only_texts) for name in names))


def join_parts(parts: Column, kind: DataType, *, only_texts: bool = False) -> Column:
    """Return the text of a content of a type: of parts, their texts.

    A content with a part that is not text becomes a text that `turns.messages` refuses.

    Args:
        only_texts: leave out parts that are not text.
    """
    if isinstance(kind, StructType | MapType):
        return join_parts(sf.when(parts.isNotNull(), sf.array(parts)), ArrayType(kind), only_texts=only_texts)
    if not isinstance(kind, ArrayType):
        return plain_text.write(parts, kind)
    if isinstance(kind.elementType, StructType | MapType):
        names = kind.elementType.fieldNames() if isinstance(kind.elementType, StructType) else [_TYPE, _TEXT]
        split = sf.transform(parts, lambda part: _as_part(part, names))
    else:
        split = sf.transform(parts.cast("array<string>"), _parse_part)
    other = sf.filter(split, lambda part: (part[_TYPE] != TEXT_PART) | part[_TEXT].isNull())
    # NB: array_join leaves out nulls.
    texts = sf.transform(split, lambda part: sf.when(part[_TYPE] == TEXT_PART, part[_TEXT]))
    joined = sf.when(parts.isNotNull(), sf.array_join(texts, BETWEEN_PARTS))
    if only_texts:
        return joined
    return sf.when(sf.size(other) > 0, sf.concat(sf.lit(OTHER_PART), other[0][_TYPE])).otherwise(joined)


def parse_conversations(text: Column, kind: DataType) -> Column:
    """Parse the JSON text of conversations; text that is no such list becomes null.

    Args:
        kind: a list of structures with a field `content`. Lists and structures in other fields stay JSON text.
    """
    assert isinstance(kind, ArrayType)  # noqa: S101 - conversations are
    assert isinstance(kind.elementType, StructType)  # noqa: S101
    texts = ArrayType(StructType([StructField(name, StringType()) for name in kind.elementType.fieldNames()]))

    lists = sf.when(text.rlike(_HAS_LIST), sf.from_json(text, _LISTS, _PARSER))
    as_texts = sf.regexp_replace(text, _NUMBER, r'"content": "$1"')
    numbers = sf.when(text.rlike(_NUMBER), sf.from_json(as_texts, _CONTENTS, _PARSER))
    return sf.transform(
        sf.from_json(text, texts, _PARSER),
        lambda turn, number: turn.withField(
            "content",
            sf.coalesce(
                join_parts(sf.get(lists, number)["content"], ArrayType(StringType())),
                sf.get(numbers, number)["content"],
                turn["content"],
            ),
        ),
    )


def _as_part(part: Column, names: list[str]) -> Column:
    kind = sf.coalesce(part[_TYPE].cast("string"), sf.lit(TEXT_PART)) if _TYPE in names else sf.lit(TEXT_PART)
    text = part[_TEXT].cast("string") if _TEXT in names else sf.lit(None).cast("string")
    return sf.struct(kind.alias(_TYPE), text.alias(_TEXT))


def _parse_part(part: Column) -> Column:
    """A part of JSON text: an object with a type or a text, or else a text."""
    parsed = sf.when(part.startswith("{"), sf.from_json(part, _PART))
    is_object = parsed[_TYPE].isNotNull() | parsed[_TEXT].isNotNull()
    return sf.struct(
        sf.coalesce(parsed[_TYPE], sf.lit(TEXT_PART)).alias(_TYPE),
        sf.when(is_object, parsed[_TEXT]).otherwise(part).alias(_TEXT),
    )
