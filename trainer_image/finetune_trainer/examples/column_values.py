"""Parses the values of the columns of an example: texts, conversations, tools, labels and margins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import chat_messages
from finetune_trainer.examples.file_formats import EXPECTED_LABELS, explain_lists
from finetune_trainer.examples.refused_rows import A_ROW, RowError
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune_crds.data import Columns

LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels of unpaired preferences as text, in any case."""


def count_rows(rows: Mapping[str, list[Any]]) -> int:
    """Count the rows of a batch of columns, which has at least one."""
    return len(next(iter(rows.values())))


def parse_labels(rows: Mapping[str, list[Any]], columns: Columns) -> list[bool | None]:
    """Return for each row of a batch of columns whether its answer is good; None for each row if the columns have no labels.

    Raises:
        RowError: the label of a row is invalid.
    """
    column = columns.label
    if column is None:
        return [None] * count_rows(rows)
    parsed = [_parse_label(value) for value in rows[column]]
    if None in parsed:
        index = parsed.index(None)
        raise RowError(
            "LabelValue",
            f"column {column} of {A_ROW} holds {rows[column][index]!r:.40}: {EXPECTED_LABELS}; correct or remove such rows",
            offset=index,
        )
    return parsed


def parse_margins(rows: Mapping[str, list[Any]], columns: Columns) -> list[float | None]:
    """Return for each row of a batch of columns by how much its chosen answer is better; None for each row if the columns have no margin.

    Splits are read with numbers as text.

    Raises:
        RowError: the margin of a row is not a finite number.
    """
    column = columns.margin
    if column is None:
        return [None] * count_rows(rows)
    return [_parse_margin(value, column, index) for index, value in enumerate(rows[column])]


def _parse_margin(value: Any, column: str, index: int) -> float:
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowError(
            "MarginValue",
            f"column {column} of {A_ROW} holds {value!r:.40}, and a margin is a finite number: correct or remove such rows",
            offset=index,
        )
    return margin


def _parse_label(value: Any) -> bool | None:
    if isinstance(value, str):
        return LABELS.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def get_texts(rows: Mapping[str, list[Any]], column: str) -> list[str]:
    """Return the values of a column of texts."""
    if not all(isinstance(value, str) for value in rows[column]):
        raise DataError(
            "ColumnType",
            explain_lists(column),
        )
    return rows[column]


def to_messages(value: Any, role: str, column: str) -> list[chat_messages.Message]:
    """Return a value as messages: a text becomes one message of the role, and a conversation is parsed."""
    return [{"role": role, "content": value}] if isinstance(value, str) else parse_conversation(value, column)


def parse_conversation(value: Any, column: str) -> list[chat_messages.Message]:
    """Return the messages in a value of a column of conversations."""
    value = chat_messages.rename(value)
    wrong = chat_messages.wrong_shape(value)
    if wrong is not None:
        raise RowError(
            "MessageShape",
            f"column {column} of {A_ROW} is not a list of {{role, content}}, {wrong}: correct or remove such rows",
        )
    try:
        return chat_messages.messages(value)
    except ValueError as error:
        raise _message_error(column, error) from error


def split_weights(
    messages: list[chat_messages.Message], column: str, field: str
) -> tuple[list[chat_messages.Message], list[bool]]:
    """Return messages without their weights, and whether each may be learned."""
    try:
        return chat_messages.weighed(messages, field)
    except ValueError as error:
        raise _message_error(column, error) from error


def _message_error(column: str, error: ValueError) -> RowError:
    return RowError(
        "MessageShape",
        f"column {column} of {A_ROW} is invalid, {error}: correct or remove such rows",
    )


def parse_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Return the tools in a value of a column of tools."""
    try:
        return chat_messages.tools(value)
    except ValueError as error:
        raise RowError(
            "ToolShape", f"column {column} of {A_ROW} is invalid, {error}: correct or remove such rows"
        ) from error


def extract_reply(
    prompt: list[chat_messages.Message], answer: list[chat_messages.Message], column: str
) -> list[chat_messages.Message]:
    """Return the messages of an answer, without those of the prompt if the answer repeats them."""
    try:
        return chat_messages.reply(prompt, answer)
    except ValueError as error:
        raise RowError("MessageShape", f"column {column} of {A_ROW} {error}") from error
