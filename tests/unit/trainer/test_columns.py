"""The columns of an example, by the schema of the data."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.data import Columns
from finetune_trainer.columns import Column, Kind, described, find
from finetune_trainer.outcome import DataError

Json = dict[str, Any]
TYPES: dict[Kind, str] = {"text": "string", "messages": "array<struct<role,content>>", "other": "bigint"}


def schema(*texts: str, messages: str = "", other: str = "") -> list[Column]:
    """A schema with these columns of each kind."""
    names: dict[Kind, tuple[str, ...]] = {
        "text": texts,
        "messages": tuple(messages.split()),
        "other": tuple(other.split()),
    }
    return [Column(name, kind, TYPES[kind]) for kind, all_names in names.items() for name in all_names]


PREFERENCE: Json = {"type": "Preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
FOUND: dict[str, tuple[list[Column], Json, Json]] = {
    "messages": (schema("id", "prompt", messages="messages"), {}, {"type": "Messages"}),
    "messages and tools": (
        schema("id", "tools", messages="messages"),
        {},
        {"type": "Messages", "tools": "tools"},
    ),
    "a column of that name that holds no tools": (
        [*schema(messages="messages"), Column("tools", "other", "array<string>")],
        {},
        {"type": "Messages"},
    ),
    "text": (schema("id", "text", "source", other="label"), {}, {"type": "Text"}),
    "prompt and response": (
        schema("prompt", "response"),
        {},
        {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
    ),
    "prompt and completion": (
        schema("prompt", "completion"),
        {},
        {"type": "PromptResponse", "prompt": "prompt", "response": "completion"},
    ),
    "instruction and output": (
        schema("instruction", "output"),
        {},
        {"type": "PromptResponse", "prompt": "instruction", "response": "output"},
    ),
    "instruction and response": (
        schema("instruction", "response", "category"),
        {},
        {"type": "PromptResponse", "prompt": "instruction", "response": "response"},
    ),
    "question and answer": (
        schema("question", "answer"),
        {},
        {"type": "PromptResponse", "prompt": "question", "response": "answer"},
    ),
    "a column of that name with another type": (
        schema("text", other="messages"),
        {},
        {"type": "Text"},
    ),
    "preferences for DPO": (schema("prompt", "chosen", "rejected"), {"dpo": True}, PREFERENCE),
    "preferences for DPO beside other examples, some of them lists": (
        schema("prompt", "response", "text", messages="chosen rejected messages"),
        {"dpo": True, "templates": ("prompt",)},
        PREFERENCE,
    ),
    "preferences are no examples for another objective": (
        schema("prompt", "chosen", "rejected", "text"),
        {},
        {"type": "Text"},
    ),
    "what templates name, of several": (
        schema("text", "instruction", "input", "output"),
        {"templates": ("instruction", "input", "output")},
        {"type": "PromptResponse", "prompt": "instruction", "response": "output"},
    ),
}


@pytest.mark.parametrize(("columns", "asked", "expected"), FOUND.values(), ids=FOUND)
def test_columns_are_known_by_their_names_and_types(
    columns: list[Column], asked: Json, expected: Json
) -> None:
    options: Json = {"dpo": False} | asked
    assert find(columns, "/corpus", **options) == Columns.model_validate(expected)


NAME = "; name them in data.columns"
REFUSED: dict[str, tuple[list[Column], Json, str]] = {
    "nothing known": (
        schema("title", "body", other="score"),
        {},
        "ColumnsUnknown: /corpus has no columns that are known to hold an example: it has body (string), score (bigint), "
        f"title (string){NAME}",
    ),
    "no columns": (
        [],
        {},
        f"ColumnsUnknown: /corpus has no columns that are known to hold an example: it has none{NAME}",
    ),
    "half a pair": (
        schema("prompt"),
        {},
        "ColumnsUnknown: /corpus has no columns that are known to hold an example: it has prompt (string)"
        + NAME,
    ),
    "templates of other names": (
        schema("text", "body"),
        {"templates": ("body",)},
        "ColumnsUnknown: /corpus has no columns that are known to hold an example: the templates name body (string)"
        + NAME,
    ),
    "DPO without preferences": (
        schema("prompt", "chosen", other="rejected"),
        {"dpo": True},
        "ColumnsUnknown: /corpus does not have the columns prompt, chosen and rejected, which objective DPO needs: it "
        f"has chosen (string), prompt (string), rejected (bigint){NAME}",
    ),
    "two kinds": (
        schema("text", "question", "answer", messages="messages"),
        {},
        "ColumnsAmbiguous: /corpus has the columns of more than one example: messages; text; prompt question, response "
        "answer; name those of one in data.columns",
    ),
    "two pairs": (
        schema("prompt", "response", "completion"),
        {},
        "ColumnsAmbiguous: /corpus has the columns of more than one example: prompt, response; prompt, response "
        "completion; name those of one in data.columns",
    ),
    "an input beside the instruction": (
        schema("instruction", "input", "output"),
        {},
        "ColumnsAmbiguous: /corpus has prompt instruction, response output, and input, which may belong to the prompt: "
        "name the columns of an example in data.columns, and render several into a prompt with "
        "data.prepare.promptTemplate",
    ),
}


@pytest.mark.parametrize(("columns", "asked", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_clear_is_refused_by_name(columns: list[Column], asked: Json, sentence: str) -> None:
    options: Json = {"dpo": False} | asked
    with pytest.raises(DataError) as refused:
        find(columns, "/corpus", **options)
    assert f"{refused.value.reason}: {refused.value.message}" == sentence


def test_columns_are_described_by_what_they_are() -> None:
    assert described(Columns(type="Preference", prompt="ask", chosen="good", rejected="rejected")) == (
        "prompt ask, chosen good, rejected"
    )
