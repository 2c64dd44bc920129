"""The columns of an example, by the schema of the data."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.chat import Conversation
from finetune_crds.data import Columns, Data
from finetune_crds.prepare import Prepare
from finetune_trainer.examples.columns import Column, Kind, describe_columns, find_columns, find_table_columns
from finetune_trainer.pod.exit_status import DataError

Json = dict[str, Any]
TYPES: dict[Kind, str] = {
    "text": "string",
    "messages": "array<struct<role,content>>",
    "label": "boolean",
    "other": "double",
}


def schema(*texts: str, messages: str = "", label: str = "", other: str = "") -> list[Column]:
    """A schema with these columns of each kind."""
    names: dict[Kind, tuple[str, ...]] = {
        "text": texts,
        "messages": tuple(messages.split()),
        "label": tuple(label.split()),
        "other": tuple(other.split()),
    }
    return [Column(name, kind, TYPES[kind]) for kind, all_names in names.items() for name in all_names]


PREFERENCE: Json = {"type": "Preference", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
UNPAIRED: Json = {"type": "Unpaired", "prompt": "prompt", "completion": "completion", "label": "label"}
FOUND: dict[str, tuple[list[Column], Json, Json]] = {
    "messages": (schema("id", "prompt", messages="messages"), {}, {"type": "Messages"}),
    "messages before conversations": (schema(messages="conversations messages"), {}, {"type": "Messages"}),
    "conversations": (
        schema("id", messages="conversations"),
        {},
        {"type": "Messages", "messages": "conversations"},
    ),
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
    "text": (schema("id", "text", "source", label="label"), {}, {"type": "Text"}),
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
    "preferences for DPO": (schema("prompt", "chosen", "rejected"), {"objective": "DPO"}, PREFERENCE),
    "preferences for DPO beside other examples, some of them lists": (
        schema("prompt", "response", "text", messages="chosen rejected messages"),
        {"objective": "DPO", "templates": ("prompt",)},
        PREFERENCE,
    ),
    "unpaired preferences for KTO": (
        schema("prompt", "completion", label="label"),
        {"objective": "KTO"},
        UNPAIRED,
    ),
    "unpaired preferences with labels that are text": (
        schema("prompt", "label", "text", messages="completion"),
        {"objective": "KTO", "templates": ("prompt",)},
        UNPAIRED,
    ),
    "labels are no examples for another objective": (
        schema("prompt", "completion", label="label"),
        {"objective": "Distillation"},
        {"type": "PromptResponse", "prompt": "prompt", "response": "completion"},
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


@pytest.mark.parametrize(("columns", "options", "expected"), FOUND.values(), ids=FOUND)
def test_columns_are_known_by_their_names_and_types(
    columns: list[Column], options: Json, expected: Json
) -> None:
    assert find_columns(columns, "/corpus", **options) == Columns.model_validate(expected)


NAME = "; name the columns of an example in data.columns"
REFUSED: dict[str, tuple[list[Column], Json, str]] = {
    "nothing known": (
        schema("title", "body", other="score"),
        {},
        "ColumnsUnknown: /corpus has no columns with well-known names of examples: it has body (string), score (double), "
        f"title (string){NAME}",
    ),
    "no columns": (
        [],
        {},
        f"ColumnsUnknown: /corpus has no columns with well-known names of examples: it has none{NAME}",
    ),
    "half a pair": (
        schema("prompt"),
        {},
        "ColumnsUnknown: /corpus has no columns with well-known names of examples: it has prompt (string)"
        + NAME,
    ),
    "templates of other names": (
        schema("text", "body"),
        {"templates": ("body",)},
        "ColumnsUnknown: /corpus has no columns with well-known names of examples: the templates name body (string)"
        + NAME,
    ),
    "DPO without preferences": (
        schema("prompt", "chosen", other="rejected"),
        {"objective": "DPO"},
        "ColumnsUnknown: /corpus does not have the columns prompt, chosen and rejected, which objective DPO "
        f"requires: it has chosen (string), prompt (string), rejected (double){NAME}",
    ),
    "KTO with labels that are none": (
        schema("prompt", "completion", other="label"),
        {"objective": "KTO"},
        "ColumnsUnknown: /corpus does not have the columns prompt, completion and label, which objective KTO "
        f"requires: it has completion (string), label (double), prompt (string){NAME}",
    ),
    "two kinds": (
        schema("text", "question", "answer", messages="messages"),
        {},
        "ColumnsAmbiguous: /corpus has the columns of several kinds of examples (messages; text; prompt question, response "
        "answer): name the columns of one kind in data.columns",
    ),
    "two pairs": (
        schema("prompt", "response", "completion"),
        {},
        "ColumnsAmbiguous: /corpus has the columns of several kinds of examples (prompt, response; prompt, response "
        "completion): name the columns of one kind in data.columns",
    ),
    "an input beside the instruction": (
        schema("instruction", "input", "output"),
        {},
        "ColumnsAmbiguous: /corpus has prompt instruction, response output, and input, which may belong to the prompt: name the columns "
        "of an example in data.columns; to render several columns into a prompt, set data.prepare.promptTemplate",
    ),
}


@pytest.mark.parametrize(("columns", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_clear_is_refused_by_name(columns: list[Column], options: Json, sentence: str) -> None:
    with pytest.raises(DataError) as refused:
        find_columns(columns, "/corpus", **options)
    assert f"{refused.value.reason}: {refused.value.message}" == sentence


def test_columns_are_described_by_what_they_are() -> None:
    assert describe_columns(Columns(type="Preference", prompt="ask", chosen="good", rejected="rejected")) == (
        "prompt ask, chosen good, rejected"
    )
    assert describe_columns(Columns(type="Unpaired", label="thumb")) == "prompt, completion, label thumb"


PREPARED = Prepare(output="/splits")


TEMPLATED = Prepare(output="/splits", prompt_template="{a}")


TURNS = Prepare(output="/splits", prompt_template="{a}", conversation=Conversation())


BOTH_TEMPLATES = Prepare(output="/splits", prompt_template="{a}", response_template="{b}")


@pytest.mark.parametrize(
    ("columns", "prepare", "expected"),
    [
        (Columns(type="Text", text="body"), None, Columns(type="Text", text="body")),
        (Columns(type="Text", text="body"), PREPARED, Columns(type="Text", text="text")),
        (Columns(type="PromptResponse", prompt="q", response="a"), PREPARED, Columns(type="PromptResponse")),
        (Columns(type="Messages", messages="chat"), PREPARED, Columns(type="Messages", messages="messages")),
        (Columns(type="Messages", tools="functions"), PREPARED, Columns(type="Messages", tools="tools")),
        (Columns(type="Messages", tools="functions"), None, Columns(type="Messages", tools="functions")),
        (Columns(type="Preference", prompt="q"), TURNS, Columns(type="Preference")),
        (Columns(type="PromptResponse", prompt="q", response="a"), TURNS, Columns(type="Messages")),
        (Columns(type="Text", text="body"), TEMPLATED, Columns(type="Text", text="text")),
        (
            Columns(type="PromptResponse", prompt="q", response="a"),
            TEMPLATED,
            Columns(type="Text", text="text"),
        ),
        (Columns(type="Text", text="body"), BOTH_TEMPLATES, Columns(type="PromptResponse")),
    ],
)
def test_a_prepared_table_has_columns_of_its_own_making(
    columns: Columns, prepare: Prepare | None, expected: Columns
) -> None:
    assert find_table_columns(Data(columns=columns, prepare=prepare)) == expected
