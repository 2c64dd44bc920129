"""Conversations with tools, from a source to what training encodes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_crds.data import Columns
from finetune_crds.training import Model
from finetune_trainer.examples import chat_templates
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod import exit_status
from finetune_trainer.prep.steps import chat, conversations
from support.tool_templates import HERMES, TEMPLATES
from unit.trainer.prep.chats import LEARNED_CALL, Trained, build_message, calling, counted, returned, tool
from unit.trainer.prep.recipes import Json, Preparer, prepared, recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession


CONTENTS = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
WITH_TOOLS: Json = {"type": "Messages", "tools": "tools"}


# Each with other tools, and so with other keys.
ROWS: list[Json] = [
    {
        "messages": [
            build_message("user", "Rain in Ulm?"),
            calling("weather", city="Ulm"),
            returned("dry"),
            build_message("assistant", "No."),
        ],
        "tools": [tool("weather", of="city")],
    },
    {
        "messages": [
            build_message("user", "What time is it?"),
            calling("clock", zone="CET"),
            returned("12:00"),
            build_message("assistant", "Noon."),
        ],
        "tools": [tool("clock", of="zone"), tool("weather", of="city")],
    },
    {"messages": [build_message("user", "Hi!"), build_message("assistant", "Hello.")], "tools": None},
]
AS_TEXT: list[Json] = [
    {
        "messages": json.dumps([turn | {"learned": True} for turn in row["messages"]]),
        "tools": json.dumps(row["tools"]) if row["tools"] else row["tools"],
    }
    for row in ROWS
]
CALLS_AS_TEXT: list[Json] = [
    row
    | {
        "messages": [
            turn | {"tool_calls": json.dumps(turn["tool_calls"])} if "tool_calls" in turn else turn
            for turn in row["messages"]
        ]
    }
    for row in ROWS
]


# Conversations that differ from the first one in a call or in the tools alone, and one that repeats it.
OTHER_CALL = ROWS[0] | {
    "messages": [ROWS[0]["messages"][0], calling("weather", city="Neu-Ulm"), *ROWS[0]["messages"][2:]]
}
OTHER_TOOLS = ROWS[0] | {"tools": ROWS[1]["tools"]}
WEIGHTED = ROWS[0] | {
    "messages": [
        *ROWS[0]["messages"],
        build_message("user", "Sure?"),
        build_message("assistant", "Yes.") | {"learned": False},
    ]
}
# As clients sent calls before they had tool_calls, and the same as they do now.
LEGACY_CALL: Json = {"name": "weather", "arguments": '{"city": "Ulm"}'}
LEGACY = [
    build_message("user", "How is Ulm?") | {"function_call": None},
    {"role": "assistant", "content": None, "function_call": LEGACY_CALL},
    {"role": "function", "content": "Rain.", "function_call": None},
    build_message("assistant", "It rains.") | {"function_call": None},
]
MODERN = [
    build_message("user", "How is Ulm?"),
    calling("weather", city="Ulm"),
    returned("Rain."),
    build_message("assistant", "It rains."),
]
# Rows without an example: tools that are no list, and messages with nothing to say.
NOTHING_TO_LEARN: list[Json] = [
    AS_TEXT[1] | {"tools": '{"name": "weather"'},
    AS_TEXT[2] | {"messages": '[{"role": "assistant", "tool_calls": []}]'},
    AS_TEXT[2] | {"messages": '[{"role": "assistant", "content": "\u00a0"}]'},
]
CALL_OF_ANOTHER_SHAPE: Json = {
    "messages": [build_message("user", "a"), {"role": "assistant", "tool_calls": "{"}],
    "tools": None,
}


@dataclass(frozen=True)
class Rendered:
    """How rows are written, and what becomes of them.

    expected: by what it shows, a conversation that training reads. dropped: what the preparation drops.
    weights: those of the messages in the table. learned: of some of the expected conversations, the part on which the loss is taken.
    """

    template: str
    rows: list[Json]
    expected: dict[str, Json]
    dropped: Json
    weight_columns: Json = field(default_factory=dict)
    weights: tuple[str | None, ...] = (None,)
    learned: dict[str, str] = field(default_factory=dict)


BY_TOOLS = {"a call": ROWS[0], "two tools": ROWS[1], "no tools": ROWS[2]}
WRITTEN: dict[str, Rendered] = {
    "structures": Rendered(
        "Hermes",
        [*ROWS, OTHER_CALL, OTHER_TOOLS, WEIGHTED, json.loads(json.dumps(ROWS[0]))],
        BY_TOOLS
        | {"another call": OTHER_CALL, "other tools": OTHER_TOOLS, "an answer of weight 0": WEIGHTED},
        {"notNull": 0, "dedupe": 1, "onTemplateError": 0},
        {"messageWeight": "learned"},
        (None, "0"),
        dict.fromkeys(("a call", "an answer of weight 0"), f"{LEARNED_CALL}No.<|im_end|>\n"),
    ),
    "text": Rendered(
        "Llama",
        [*AS_TEXT, *NOTHING_TO_LEARN, {"messages": json.dumps(LEGACY), "tools": None}],
        BY_TOOLS | {"a call before tool_calls": {"messages": MODERN, "tools": None}},
        {"notNull": 3, "dedupe": 0, "onTemplateError": 0},
        {"messageWeight": "learned"},
        (None, "1"),
    ),
    "calls as text": Rendered(
        "Llama",
        [*CALLS_AS_TEXT, CALL_OF_ANOTHER_SHAPE],
        BY_TOOLS,
        {"notNull": 0, "dedupe": 0, "onTemplateError": 1},
    ),
    "tools that the template does not render": Rendered(
        "contents",
        ROWS,
        {"no tools": ROWS[2]},
        {"notNull": 0, "dedupe": 0, "onTemplateError": 2},
    ),
}


@pytest.mark.parametrize("case", WRITTEN.values(), ids=WRITTEN)
def test_training_reads_what_the_template_makes_of_the_source(
    preparing: Callable[[str], Preparer], case: Rendered
) -> None:
    preparer = preparing((TEMPLATES | {"contents": CONTENTS})[case.template])
    result = preparer(case.rows, columns=WITH_TOOLS | case.weight_columns, onTemplateError="Drop")
    trained = Trained(result, preparer.folder / "model", WITH_TOOLS)
    names = {
        chat_templates.render(trained.tokenizer, row["messages"], row["tools"]): name
        for name, row in case.expected.items()
    }
    shown = [names.get(text, text) for text in trained.texts]
    assert sorted(shown) == sorted(case.expected)
    learned = dict(zip(shown, trained.learned, strict=True))
    assert {name: learned[name] for name in case.learned} == case.learned
    assert sorted(trained.tokens) == counted(result)
    assert result.dropped == case.dropped
    weights = {turn.get("weight") for row in table_of(result) for turn in row["messages"]}
    assert weights == {*case.weights}


def test_calls_of_before_tool_calls(preparing: Callable[[str], Preparer]) -> None:
    preparer = preparing(HERMES)
    result = preparer([{"messages": LEGACY}], columns={"type": "Messages"})
    (row,) = table_of(result)
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    calls = [json.loads(turn["tool_calls"]) for turn in row["messages"] if turn["tool_calls"]]
    assert calls == [[{"type": "function", "function": LEGACY_CALL}]]
    trained = Trained(result, preparer.folder / "model", {"type": "Messages"})
    assert '"name": "weather", "arguments": {"city": "Ulm"}' in trained.learned[0]


def test_the_table_has_structures_as_json_text(preparing: Callable[[str], Preparer]) -> None:
    preparer = preparing(HERMES)
    preparer.run = prepared
    result = preparer(ROWS[1:], columns=None)
    assert result.columns == Columns(type="Messages", tools="tools")
    plain, called = sorted(table_of(result), key=lambda row: len(row["messages"]))
    assert list(called) == ["id", "messages", "tools", "input_ids", "loss_mask", "tokens", "split"]
    nothing = {"tool_calls": None, "tool_call_id": None}
    assert (plain["tools"], plain["messages"]) == (
        "[]",
        [build_message("user", "Hi!") | nothing, build_message("assistant", "Hello.") | nothing],
    )
    assert json.loads(called["tools"]) == ROWS[1]["tools"]
    assert [turn["tool_call_id"] for turn in called["messages"]] == [None, None, "c1", None]
    assert json.loads(called["messages"][1]["tool_calls"]) == ROWS[1]["messages"][1]["tool_calls"]


def test_tools_that_are_no_definitions_are_refused(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(["look"],)], "tools array<string>")
    with pytest.raises(
        exit_status.DataError, match="column tools holds array<string>: tools are a list of definitions"
    ):
        conversations.tools(frame, "tools")


def test_a_template_without_tools_is_refused(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(Model(base="/model"), tokenizer_folder)
    tokenizer.chat_template = CONTENTS
    with pytest.raises(exit_status.RecipeRefusedError) as refused:
        chat.check(tokenizer, recipe(columns=WITH_TOOLS))
    assert refused.value.message == (
        "data.columns.tools requires a chat template that renders tools, and the one of /model does not: set "
        "model.chatTemplate, remove data.columns.tools, or drop conversations with tools by "
        "data.prepare.onTemplateError: Drop"
    )


def test_calls_that_the_template_leaves_out_fail_the_preparation(
    preparing: Callable[[str], Preparer],
) -> None:
    preparer = preparing(CONTENTS)
    with pytest.raises(exit_status.DataError) as failed:
        preparer(ROWS[:1], columns={"type": "Messages"})
    assert (failed.value.reason, failed.value.message) == (
        "TemplateFailed",
        f"the chat template of the model fails on row 1 of {preparer.folder}/corpus-0/0.parquet with the roles user, assistant, tool, "
        "assistant: it does not render tool calls: set model.chatTemplate to one that does; to drop these rows, set "
        "data.prepare.onTemplateError: Drop",
    )


def test_a_mix_of_sources_with_tools_and_without(
    preparing: Callable[[str], Preparer], tmp_path: Path
) -> None:
    preparer = preparing(HERMES)
    plain: list[Json] = [
        {"messages": [build_message("user", f"Say {word}."), build_message("assistant", word)]}
        for word in ("a", "b", "c")
    ]
    # Tools that are no list are not no tools.
    plain[2]["tools"] = "{"
    counted = [
        build_message("user", "Count."),
        build_message("assistant", "1"),
        build_message("user", "On."),
        build_message("assistant", "2"),
    ]
    weighed: list[Json] = [
        {
            "messages": [
                turn | {"weight": weight}
                for turn, weight in zip(counted, (weight, first, weight, second), strict=True)
            ]
        }
        # The last two are the same: an answer without a weight is learned, and that of another message says nothing.
        for weight, first, second in ((None, 0, 1), (None, 1.0, 0), (0, 1, 1), (None, None, None))
    ]
    sources = []
    for name, rows in {"tools": ROWS[:3], "plain": plain + weighed}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # So many of each that all of them are taken.
        sources.append({"name": name, "type": "JSONLines", "path": str(path), "weight": len(rows)})
    result = preparer([{"unused": 1}], source={"type": "Mix", "sources": sources}, columns=None)
    trained = Trained(result, preparer.folder / "model", WITH_TOOLS)
    rows = [*ROWS[:3], *plain[:2], *weighed[:3]]
    assert result.dropped == {"notNull": 1, "dedupe": 1}
    expected = [chat_templates.render(trained.tokenizer, row["messages"], row.get("tools")) for row in rows]
    assert sorted(trained.texts) == sorted(expected)
    of_counts = [text for text in trained.learned if text[0] in "12"]
    assert sorted(of_counts) == ["1<|im_end|>\n", "1<|im_end|>\n2<|im_end|>\n", "2<|im_end|>\n"]


def test_filters_see_the_tools_of_the_source_before_values_in_calls_and_tools_are_replaced(
    preparing: Callable[[str], Preparer],
) -> None:
    row = {
        "messages": [
            build_message("user", "Charge it."),
            calling("charge", card=4111111111111111, to="jane@example.com")
            | {"reasoning_content": "It is for jane@example.com."},
            # A template may leave out what was thought before an earlier answer.
            build_message("assistant", "Done."),
        ],
        "tools": [tool("charge", of="card") | {"owner": "jane@example.com"}],
    }
    result = preparing(HERMES)(
        [row, *ROWS[1:]],
        columns=WITH_TOOLS,
        notNull=["tools"],
        filter="tools IS NOT NULL AND size(tools) = 1",
        redact=["Email", "CardNumber"],
    )
    assert result.dropped == {"notNull": 1, "filter": 1, "dedupe": 0}
    (table_row,) = table_of(result)
    (call,) = json.loads(table_row["messages"][1]["tool_calls"])
    assert call["function"]["arguments"] == {"card": "<CARD_NUMBER>", "to": "<EMAIL>"}
    assert json.loads(table_row["tools"])[0]["owner"] == "<EMAIL>"
    assert [turn["reasoning_content"] for turn in table_row["messages"]] == [None, "It is for <EMAIL>.", None]
    assert result.redacted == {"Email": 3, "CardNumber": 1}


def test_near_duplicates_are_told_by_what_the_user_and_the_assistant_say(
    preparing: Callable[[str], Preparer],
) -> None:
    """All rows have one instruction, the same tools and the same results of them."""
    long = " ".join(f"rule{number}" for number in range(200))

    def row(number: int, end: str = "") -> Json:
        words = [f"word{number}x{place}" for place in range(24)]
        turns = [
            build_message("system", long),
            build_message("user", " ".join(words[:12])),
            calling("weather", city=words[0]),
            returned(long),
            build_message("assistant", " ".join(words[12:]) + end),
        ]
        return {"messages": turns, "tools": [tool(f"weather{at}", of=f"city {long}") for at in range(6)]}

    rows = [*(row(number) for number in range(12)), row(0, " now"), row(1, " then")]
    result = preparing(HERMES)(rows, columns=WITH_TOOLS, dedupe={"near": {}})
    assert result.dropped == {"notNull": 0, "dedupe": 0, "near": 2}
