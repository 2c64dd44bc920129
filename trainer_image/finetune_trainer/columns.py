"""Finds the columns of an example in the schema of the data, where the recipe names none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune_crds.data import Columns
from finetune_trainer.outcome import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Kind = Literal["text", "messages", "other"]

# Names of prompt and response in common data sets.
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
# Texts that data sets with such a pair keep beside it, and that belong to the prompt of some of their rows.
_BESIDE_A_PAIR = ("input", "context")
_PREFERENCE = ("prompt", "chosen", "rejected")


class Column(NamedTuple):
    """A column of the data.

    kind: text, messages (a list of {role, content}), or what no example is made of.
    type: its type as the format of the data names it.
    """

    name: str
    kind: Kind
    type: str


def find(schema: Sequence[Column], where: str, *, dpo: bool, templates: Collection[str] = ()) -> Columns:
    """Return the columns that hold an example, by their well-known names.

    For DPO: prompt, chosen and rejected. Otherwise: messages (and tools beside them), text, or one of the pairs of prompt and
    response.

    Args:
        schema: the columns of the data.
        where: the data, for errors.
        dpo: whether examples are preferences.
        templates: columns that the recipe's templates name; if any, the others hold no example. Not for preferences.

    Raises:
        DataError: no columns are known to hold an example, or columns of more than one example are.
    """
    if dpo:
        return _preference(schema, where)
    considered = [column for column in schema if column.name in templates] if templates else schema
    found = _examples(considered)
    if not found:
        among = "the templates name" if templates else "it has"
        raise DataError(
            "ColumnsUnknown",
            f"{where} has no columns that are known to hold an example: {among} {_listed(considered)}; name them in "
            "data.columns",
        )
    if len(found) > 1:
        raise DataError(
            "ColumnsAmbiguous",
            f"{where} has the columns of more than one example: {'; '.join(map(described, found))}; name those of one "
            "in data.columns",
        )
    beside = [] if templates or found[0].prompt is None else _texts(schema, _BESIDE_A_PAIR)
    if beside:
        raise DataError(
            "ColumnsAmbiguous",
            f"{where} has {described(found[0])}, and {' and '.join(beside)}, which may belong to the prompt: name the "
            "columns of an example in data.columns, and render several into a prompt with data.prepare.promptTemplate",
        )
    return found[0]


def described(columns: Columns) -> str:
    """Return columns as text, such as `prompt question, response answer`."""
    roles = ("text", "messages", "tools", "prompt", "response", "chosen", "rejected")
    named = {role: name for role in roles if (name := getattr(columns, role)) is not None}
    return ", ".join(role if role == name else f"{role} {name}" for role, name in named.items())


def _preference(schema: Sequence[Column], where: str) -> Columns:
    usable = {column.name for column in schema if column.kind != "other"}
    if not usable.issuperset(_PREFERENCE):
        raise DataError(
            "ColumnsUnknown",
            f"{where} does not have the columns prompt, chosen and rejected, which objective DPO needs: it has "
            f"{_listed(schema)}; name them in data.columns",
        )
    return Columns(type="Preference")


def _may_be_tools(column: Column) -> bool:
    """Whether a column can hold definitions of tools: JSON text, or a list of structures."""
    return (
        column.kind == "text"
        or column.type == "list"
        or any(kind in column.type for kind in ("struct", "map"))
    )


def _examples(schema: Sequence[Column]) -> list[Columns]:
    """Return the columns of each example, other than preferences, that the schema has."""
    kinds = {column.name: column.kind for column in schema}
    tools = next((column.name for column in schema if column.name == "tools" and _may_be_tools(column)), None)
    found = [Columns(type="Messages", tools=tools)] if kinds.get("messages") == "messages" else []
    found += [Columns(type="Text")] if kinds.get("text") == "text" else []
    return found + [
        Columns(type="PromptResponse", prompt=prompt, response=response)
        for prompt, response in _PAIRS
        if kinds.get(prompt) == kinds.get(response) == "text"
    ]


def _texts(schema: Sequence[Column], names: Collection[str]) -> list[str]:
    return [column.name for column in schema if column.kind == "text" and column.name in names]


def _listed(schema: Sequence[Column]) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in sorted(schema)) or "none"
