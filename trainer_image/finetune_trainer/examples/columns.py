"""Finds the columns of an example in the schema of the data, if the recipe does not name them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune_crds.base import join_names
from finetune_crds.data import Columns
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, OBJECTIVES_OF_COLUMNS, ObjectiveType
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from finetune_crds.data import Data

Kind = Literal["text", "messages", "label", "other"]

# Names of prompt and response in common data sets.
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
# Column names of conversations in common data sets, from OpenAI and ShareGPT.
_CONVERSATIONS = ("messages", "conversations")
# Columns of texts that data sets have beside a prompt and a response; in some rows, their text belongs to the prompt.
_EXTRA_PROMPT_COLUMNS = ("input", "context")


class Column(NamedTuple):
    """A column of the data.

    kind: text, messages (a list of {role, content}), label (a boolean or an integer), or other: not part of an example.
    type: its type as the format of the data names it, for example list<element: string>.
    """

    name: str
    kind: Kind
    type: str


def find_columns(
    schema: Sequence[Column], where: str, *, objective: ObjectiveType = "SFT", templates: Collection[str] = ()
) -> Columns:
    """Return the columns that hold an example, by their well-known names.

    For preferences: prompt, chosen and rejected. For KTO: prompt, completion and label. Otherwise: messages or conversations (and tools
    beside them), text, or one of the pairs of prompt and response.

    Args:
        schema: the columns of the data.
        where: the data, for errors.
        objective: what examples are for.
        templates: columns that the recipe's templates name; if there are any, other columns are ignored. Not used for preferences and KTO.

    Raises:
        DataError: no columns have well-known names, the columns of several kinds of examples have them, or a further column may belong to
            the prompt.
    """
    if objective in COLUMNS_OF_OBJECTIVE:
        return _find_preference_columns(schema, where, objective)
    considered = [column for column in schema if column.name in templates] if templates else schema
    examples = _find_examples(considered)
    if not examples:
        among = "the templates name" if templates else "it has"
        raise DataError(
            "ColumnsUnknown",
            f"{where} has no columns with well-known names of examples: {among} {_list_columns(considered)}; name the columns of an "
            "example in data.columns",
        )
    example, *other_examples = examples
    if other_examples:
        raise DataError(
            "ColumnsAmbiguous",
            f"{where} has the columns of several kinds of examples ({'; '.join(map(describe_columns, examples))}): name the columns of "
            "one kind in data.columns",
        )
    # Templates already show what belongs to the prompt, and without a prompt column, there is nothing that a text could belong to.
    extra_texts = [] if templates or example.prompt is None else _find_texts(schema, _EXTRA_PROMPT_COLUMNS)
    if extra_texts:
        raise DataError(
            "ColumnsAmbiguous",
            f"{where} has {describe_columns(example)}, and {' and '.join(extra_texts)}, which may belong to the prompt: name the "
            "columns of an example in data.columns; to render several columns into a prompt, set data.prepare.promptTemplate",
        )
    return example


def find_table_columns(data: Data) -> Columns:
    """Return the columns of an example in the splits: the preparation names the columns of its table itself."""
    columns = data.columns
    assert columns is not None  # noqa: S101 - the recipe names them, or they were found
    if data.prepare is None:
        return columns
    # `Columns` without names has the default names of its type, which are those of the table.
    if columns.type in OBJECTIVES_OF_COLUMNS:
        return Columns(type=columns.type, margin="margin" if columns.margin else None)
    if data.prepare.conversation is not None or columns.messages is not None:
        return Columns(type="Messages", tools="tools" if columns.tools else None)
    if data.prepare.response_template is not None:
        return Columns(type="PromptResponse")
    # Without a response template, the prompt template renders the whole text.
    if data.prepare.prompt_template is not None or columns.text is not None:
        return Columns(type="Text")
    return Columns(type="PromptResponse")


def missing_weights_error(column: str, field: str) -> DataError:
    """Return the error of conversations without the field that data.columns.messageWeight names."""
    # NB: answers without the field are learned, so a wrong name would go unnoticed.
    return DataError(
        "MissingField",
        f"no message of column {column} has the field {field}: correct data.columns.messageWeight, or remove it",
    )


def describe_columns(columns: Columns) -> str:
    """Return columns as text, such as `prompt question, response answer`."""
    roles = (role for role in Columns.model_fields if role != "type")
    names = {role: name for role in roles if (name := getattr(columns, role)) is not None}
    return ", ".join(role if role == name else f"{role} {name}" for role, name in names.items())


def _find_preference_columns(schema: Sequence[Column], where: str, objective: ObjectiveType) -> Columns:
    """Return the columns of examples of an objective that compares answers: they must have their default names."""
    columns = Columns.model_validate({"type": COLUMNS_OF_OBJECTIVE[objective]})
    kinds = {column.name: column.kind for column in schema}
    usable = all(kinds.get(name) in ("text", "messages") for name in columns.content_columns)
    if not usable or (columns.label and kinds.get(columns.label) not in ("text", "label")):
        raise DataError(
            "ColumnsUnknown",
            f"{where} does not have the columns {join_names(columns.column_names)}, which objective {objective} requires: it has "
            f"{_list_columns(schema)}; name the columns of an example in data.columns",
        )
    return columns


def _may_be_tools(column: Column) -> bool:
    """Whether a column can hold definitions of tools: JSON text, or a list of structures."""
    # JSON lines have only the name of the outer type; Arrow and Spark name the types inside it too.
    return (
        column.kind == "text"
        or column.type == "list"
        or any(kind in column.type for kind in ("struct", "map"))
    )


def _find_examples(schema: Sequence[Column]) -> list[Columns]:
    """Return the columns of each kind of example that the schema has, other than preferences."""
    kinds = {column.name: column.kind for column in schema}
    tools = next((column.name for column in schema if column.name == "tools" and _may_be_tools(column)), None)
    conversations = next((name for name in _CONVERSATIONS if kinds.get(name) == "messages"), None)
    examples = [Columns(type="Messages", messages=conversations, tools=tools)] if conversations else []
    examples += [Columns(type="Text")] if kinds.get("text") == "text" else []
    return examples + [
        Columns(type="PromptResponse", prompt=prompt, response=response)
        for prompt, response in _PAIRS
        if kinds.get(prompt) == kinds.get(response) == "text"
    ]


def _find_texts(schema: Sequence[Column], names: Collection[str]) -> list[str]:
    return [column.name for column in schema if column.kind == "text" and column.name in names]


def _list_columns(schema: Sequence[Column]) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in sorted(schema)) or "none"
