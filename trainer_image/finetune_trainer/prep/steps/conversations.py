"""Spark expressions for conversations: conversations in a source, and conversations made of prompts and answers.

A conversation is a list of {role, content} with the fields `Form.carried`. Structures in the source, for example tool_calls,
become JSON text, so that sources with different structures have the same columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, MapType, NullType, StringType, StructField, StructType

from finetune_trainer.examples.chat_messages import (
    FIELDS,
    LEGACY_CALL,
    REASONING,
    ROLES,
    UNSPOKEN,
    WEIGHT,
    WEIGHTS,
    wrap_call,
)
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import content, plain_text
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.plan import MESSAGES, PROMPT, RESPONSE, TOOLS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from finetune_trainer.prep.plan import Form

_EMPTY_LIST = "[]"
_CALLS = "tool_calls"


def parse(frame: DataFrame, form: Form) -> DataFrame:
    """Parse the conversations of a source, which may have `messages` as JSON text. Text that is not a list of messages becomes null.

    Raises:
        DataError: a column holds neither conversations nor text.
    """
    for name in form.spoken:
        frame = frame.withColumn(name, _parse_column(name, frame.schema[name].dataType, form))
    return frame


def with_tools(frame: DataFrame, form: Form) -> DataFrame:
    """Convert the tools of a source to JSON text: an empty list if a row has no tools, null if they are not a list.

    Raises:
        DataError: the column has neither lists of structures nor text.
    """
    return frame if form.tools is None else frame.withColumn(form.tools, tools(frame, form.tools))


def tools(frame: DataFrame, name: str) -> Column:
    """Return the tools of a source as `with_tools` converts them; raises as `with_tools` does."""
    kind = frame.schema[name].dataType
    column = sf.col(quoted(name))
    if isinstance(kind, NullType):
        return sf.lit(_EMPTY_LIST)
    if isinstance(kind, StringType):
        is_list = sf.from_json(column, ArrayType(StringType())).isNotNull()
        blank = column.isNull() | ~column.rlike(r"(?U)\S")
        return sf.when(blank, sf.lit(_EMPTY_LIST)).when(is_list, column)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType | MapType):
        is_written = plain_text.written(name) in frame.columns
        json_text = (
            plain_text.without_nulls(sf.col(quoted(plain_text.written(name))))
            if is_written
            else plain_text.write_json(column, kind)
        )
        return sf.coalesce(json_text, sf.lit(_EMPTY_LIST))
    raise DataError(
        "WrongColumnType",
        f"column {name} holds {kind.simpleString()}: tools are a list of definitions, or the same as JSON text",
    )


def _parse_column(name: str, kind: DataType, form: Form) -> Column:
    """Return the conversations of a column, with the fields role, content and `Form.carried`; raises as `parse` does."""
    column, carried = sf.col(quoted(name)), form.carried
    # The names of a message's fields in the source, by the names that the fields get.
    source_names = {field: field for field in ("role", "content", *carried)}
    if form.weight and WEIGHT in source_names:
        source_names[WEIGHT] = form.weight
    if isinstance(kind, StringType):
        # JSON text may have a field under any of its names.
        names = dict.fromkeys([*source_names.values(), *FIELDS.values(), LEGACY_CALL])
        string_fields = [StructField(field, StringType()) for field in names]
        kind = ArrayType(StructType(string_fields))
        column = content.parse_conversations(column, kind)
    if not content.is_conversation(kind):
        raise DataError(
            "WrongColumnType",
            f"column {name} holds {kind.simpleString()}: conversations are lists of {{role, content}}, or the same as JSON "
            "text",
        )
    assert isinstance(kind, ArrayType)  # noqa: S101 - see `is_conversation`
    assert isinstance(kind.elementType, StructType)  # noqa: S101
    message_type = kind.elementType
    types = {field.name: field.dataType for field in message_type}

    def read_field(message: Column, source_name: str) -> Column:
        if source_name == _CALLS and LEGACY_CALL in types:
            calls = sf.nullif(read_as_is(message, source_name), sf.lit(_EMPTY_LIST))
            return sf.coalesce(calls, _wrap_call(read_as_is(message, LEGACY_CALL)))
        return read_as_is(message, source_name)

    def read_as_is(message: Column, source_name: str) -> Column:
        if source_name == "content":
            return content.text_of(message, message_type)
        if source_name == "role":
            names = [role_name for role_name in ("role", FIELDS["role"]) if role_name in types]
            return sf.coalesce(*(message[role_name].cast("string") for role_name in names))
        if source_name not in types:
            return sf.lit(None).cast("string")
        # A weight that has another name in the source is not in `carried`, and is written as plain text.
        can_be_json = source_name in (*carried, LEGACY_CALL)
        is_json = can_be_json and isinstance(types[source_name], ArrayType | StructType | MapType)
        write = plain_text.write_json if is_json else plain_text.write
        return write(message[source_name], types[source_name])

    return sf.transform(
        column,
        lambda message: _build_message(
            {field: read_field(message, source_name) for field, source_name in source_names.items()}
        ),
    )


def _wrap_call(call: Column) -> Column:
    """Return a call as a list of calls; null if the call has no name: some writers add an empty call to messages without a call."""
    # The texts before and after a call in the JSON text of a list.
    before, after = wrap_call("\0").split("\0")
    return sf.when(
        sf.get_json_object(call, "$.name").isNotNull(), sf.concat(sf.lit(before), call, sf.lit(after))
    )


def _build_message(fields: dict[str, Column]) -> Column:
    """Return a message of these fields, with roles as in `ROLES`, null for an empty list of calls, and 1 or 0 for valid weights."""
    role = fields["role"]
    for theirs, ours in ROLES.items():
        role = sf.when(fields["role"] == theirs, sf.lit(ours)).otherwise(role)
    fields = fields | {"role": role}
    if _CALLS in fields:
        fields = fields | {_CALLS: sf.nullif(fields[_CALLS], sf.lit(_EMPTY_LIST))}
    if WEIGHT in fields:
        word = sf.lower(sf.trim(fields[WEIGHT]))
        for number, is_learned in (("1", True), ("0", False)):
            words = [text for text, weight in WEIGHTS.items() if weight is is_learned]
            fields = fields | {WEIGHT: sf.when(word.isin(words), sf.lit(number)).otherwise(fields[WEIGHT])}
    return sf.struct(*(value.alias(name) for name, value in fields.items()))


def is_blank(name: str, form: Form) -> Column:
    """Return whether a conversation is incomplete or has no text; null for a conversation that is null.

    Each message must have a role, and content or calls. One message at least must have calls, or content that is not blank.
    """

    def has_calls(message: Column) -> Column:
        return message[_CALLS].isNotNull() if _CALLS in form.carried else sf.lit(False)

    column = sf.col(quoted(name))
    is_complete = sf.forall(
        column,
        lambda message: message["role"].isNotNull() & (message["content"].isNotNull() | has_calls(message)),
    )
    has_text = sf.exists(column, lambda message: message["content"].rlike(r"(?U)\S") | has_calls(message))
    return ~(is_complete & has_text)


def conversation_text(name: str, form: Form) -> Column:
    """Return the text of a conversation: the fields of its messages except weights, one per line."""
    fields = [field for field in ("role", "content", *form.carried) if field != WEIGHT]
    message_texts = sf.transform(
        sf.col(quoted(name)), lambda message: sf.concat_ws("\n", *(message[field] for field in fields))
    )
    return sf.concat_ws("\n", message_texts)


def weights(name: str) -> Column:
    """Return the weights of a conversation's messages as text; 1 for an answer without a weight, and for a message that is not an answer."""

    def weight(message: Column) -> Column:
        return sf.coalesce(sf.when(message["role"] == "assistant", message[WEIGHT]), sf.lit("1"))

    return sf.concat_ws(" ", sf.transform(sf.col(quoted(name)), weight))


def has_weights(name: str) -> Column:
    """Return whether a message of a conversation has a weight."""
    return sf.exists(sf.col(quoted(name)), lambda message: message[WEIGHT].isNotNull())


def contents(name: str) -> Column:
    """Return the contents of the messages of a conversation, a line for each."""
    return sf.concat_ws("\n", sf.transform(sf.col(quoted(name)), lambda message: message["content"]))


def spoken_text(name: str, form: Form) -> Column:
    """Return what the user and the assistant say in a conversation, a line for each field: contents, thoughts and calls.

    Instructions and the results of tools are left out: conversations of one application share them.
    """
    messages = sf.filter(sf.col(quoted(name)), lambda message: ~message["role"].isin(*UNSPOKEN))
    fields = [field for field in ("content", *REASONING, _CALLS) if field in ("content", *form.carried)]
    return sf.concat_ws(
        "\n",
        sf.transform(messages, lambda message: sf.concat_ws("\n", *(message[field] for field in fields))),
    )


def count_characters(name: str) -> Column:
    """Return the number of characters of the contents of a conversation's messages."""
    lengths = sf.transform(
        sf.col(quoted(name)), lambda message: sf.coalesce(sf.length(message["content"]), sf.lit(0))
    )
    return sf.aggregate(lengths, sf.lit(0), lambda total, length: total + length)


def build_columns(form: Form) -> list[Column]:
    """Return the table's columns for examples that the chat template renders."""
    if form.messages is not None:
        message_columns = [sf.col(quoted(form.messages)).alias(MESSAGES)]
        return message_columns + ([sf.col(quoted(form.tools)).alias(TOOLS)] if form.tools else [])
    rendered = {name: template.render() for name, template in form.rendered.items()}
    if not form.judged:
        messages = [
            *_build_system_message(form),
            _build_text_message("user", rendered[PROMPT], form),
            _build_text_message("assistant", rendered[RESPONSE], form),
        ]
        is_rendered = rendered[PROMPT].isNotNull() & rendered[RESPONSE].isNotNull()
        return [sf.when(is_rendered, sf.array(*messages)).alias(MESSAGES)]
    # The source columns of the prompt and the answers, in the order of (PROMPT, *form.judged).
    names = [name for name in form.required if name not in (form.label, form.margin)]
    columns = dict(zip((PROMPT, *form.judged), names, strict=True))

    def build_conversation(name: str, column: str) -> Column:
        if column in form.spoken:
            return sf.col(quoted(column))
        if name == PROMPT:
            messages = [*_build_system_message(form), _build_text_message("user", rendered[name], form)]
        else:
            messages = [_build_text_message("assistant", rendered[name], form)]
        return sf.when(rendered[name].isNotNull(), sf.array(*messages))

    return [build_conversation(name, column).alias(name) for name, column in columns.items()]


def _build_system_message(form: Form) -> list[Column]:
    instruction = form.conversation.system if form.conversation else None
    return [_build_text_message("system", sf.lit(instruction), form)] if instruction is not None else []


def _build_text_message(role: str, text: Column, form: Form) -> Column:
    empty_fields = {name: sf.lit(None).cast("string") for name in form.carried}
    return _build_message({"role": sf.lit(role), "content": text, **empty_fields})


def display_text(form: Form) -> Column:
    """Return the conversations of an example as people read them, from the columns of the table."""
    fields = ["role", "content", *([_CALLS] if _CALLS in form.carried else [])]

    def show_messages(column: str) -> Column:
        return sf.transform(
            sf.col(column), lambda message: sf.concat_ws(": ", *(message[field] for field in fields))
        )

    return sf.concat_ws(
        "\n", *(sf.col(name) if name == TOOLS else show_messages(name) for name in form.columns)
    )
