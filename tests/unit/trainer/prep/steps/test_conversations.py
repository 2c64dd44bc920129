"""Conversations with tools, and preferences that the chat template renders, from a source to what training encodes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.data import Columns, Splits
from finetune_crds.training import Model
from finetune_trainer.examples import chat_templates
from finetune_trainer.examples.columns import find_table_columns
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.token_columns import read_documents, token_columns
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod import exit_status
from finetune_trainer.prep.steps import chat, conversations
from finetune_trainer.train.data import read
from finetune_trainer.train.data.encode import Encoder
from support.tool_templates import HERMES, TEMPLATES
from unit.trainer.prep.recipes import PAIR_TOKENS, Preparer, prepared, recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.contract import PrepResult

Json = dict[str, Any]
CONTENTS = "{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
WITH_TOOLS: Json = {"type": "Messages", "tools": "tools"}


def tool(name: str, *, of: str) -> Json:
    """The definition of a tool with one parameter, in the order of keys that clients send."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": {of: {"type": "string"}}, "required": [of]},
        },
    }


def calling(name: str, **arguments: Any) -> Json:
    calls = [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def build_message(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def returned(content: str) -> Json:
    return {"role": "tool", "content": content, "tool_call_id": "c1"}


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


@pytest.fixture
def preparing(spark: SparkSession, tokenizer_folder: Path, tmp_path: Path) -> Callable[[str], Preparer]:
    """Makes what prepares rows for a model with a chat template."""

    def build_preparer(template: str) -> Preparer:
        model = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
        (model / "chat_template.jinja").write_text(template)
        return Preparer(spark, model, tmp_path)

    return build_preparer


class Trained:
    """What training encodes of a prepared table.

    texts: of each document. learned: the part of each on which the loss is taken. tokens: of each example.
    """

    def __init__(self, result: PrepResult, model: Path, columns: Json, **prepare: Any) -> None:
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(Model(base=str(model)), model)
        table_columns: Columns = find_table_columns(recipe(columns=columns, **prepare).data)
        encoder = Encoder(Documents(self.tokenizer, table_columns, answers_only=True), 100_000, "Fail")
        splits = Splits(type="Delta", path=result.path, version=result.version)
        assert read.has_token_ids(splits, encoder.documents.encoding)
        names = token_columns(table_columns)
        ids = [name for each in names for name in each]
        self.texts: list[str] = []
        self.learned: list[str] = []
        self.tokens: list[int] = []
        for rows in read.read(splits, "train", table_columns.column_names + ids, label=table_columns.label):
            assert [*read_documents(rows, names)] == [*encoder.documents.of(rows)]
            for example in encoder.encode(rows):
                self.tokens.append(len(example.tokens))
                ends = example.lengths.cumsum()
                for begin, end in zip(ends - example.lengths, ends, strict=True):
                    tokens, mask = example.tokens[begin:end], example.loss_mask[begin:end]
                    self.texts.append(self.tokenizer.decode(tokens))
                    self.learned.append(self.tokenizer.decode(tokens[mask]))


def counted(result: PrepResult) -> list[int]:
    """The tokens that the preparation counted for each example, sorted."""
    return sorted(row["tokens"] for row in table_of(result))


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
LEARNED_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|im_end|>\n'
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


PREFERENCE: Json = {"type": "Preference"}
DPO: Json = {"type": "DPO"}


def pair(name: str) -> list[Json]:
    return [build_message("user", name), build_message("assistant", f"{name}!")]


def hermes(*turns: Json) -> str:
    """What the template makes of turns behind a system turn."""
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


DEFAULT, BRIEF = build_message("system", "You may call tools."), build_message("system", "Be brief.")
GOOD, BAD = build_message("assistant", "Blue."), build_message("assistant", "Red.")
SKY = build_message("user", "Sky?")
PREFERENCES: dict[str, tuple[Json, Json, list[Json]]] = {
    "texts": (
        {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {}},
        [DEFAULT, SKY],
    ),
    "texts behind a system turn": (
        {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {"system": "Be brief."}},
        [BRIEF, SKY],
    ),
    "a template of the prompt": (
        {"prompt": "Sky", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {}, "promptTemplate": "{prompt}?"},
        [DEFAULT, SKY],
    ),
    "answers that repeat the prompt, which is text": (
        {"prompt": "Sky?", "chosen": [SKY, GOOD], "rejected": [SKY, BAD]},
        {},
        [DEFAULT, SKY],
    ),
    "answers that repeat the prompt, behind a system turn": (
        {"prompt": "Sky?", "chosen": [SKY, GOOD], "rejected": [SKY, BAD]},
        {"conversation": {"system": "Be brief."}},
        [BRIEF, SKY],
    ),
    "lists": (
        {"prompt": [BRIEF, *pair("a"), SKY], "chosen": [GOOD], "rejected": [BAD]},
        {},
        [BRIEF, *pair("a"), SKY],
    ),
    "a prompt that is a list, and answers that are texts": (
        {"prompt": [*pair("a"), SKY], "chosen": "Blue.", "rejected": "Red."},
        {},
        [DEFAULT, *pair("a"), SKY],
    ),
}


@pytest.mark.parametrize(("row", "prepare", "prompt"), PREFERENCES.values(), ids=PREFERENCES)
def test_training_prefers_answers_behind_the_rendered_prompt(
    preparing: Callable[[str], Preparer], row: Json, prepare: Json, prompt: list[Json]
) -> None:
    preparer = preparing(HERMES)
    result = preparer([row], columns=PREFERENCE, objective=DPO, **prepare)
    trained = Trained(result, preparer.folder / "model", PREFERENCE, **prepare)
    assert trained.texts == [hermes(*prompt, GOOD), hermes(*prompt, BAD)]
    assert trained.learned == ["Blue.<|im_end|>\n", "Red.<|im_end|>\n"]
    assert trained.tokens == counted(result)
    assert list(table_of(result)[0]) == [
        "id",
        "prompt",
        "chosen",
        "rejected",
        *PAIR_TOKENS,
        "tokens",
        "split",
    ]


def test_unpaired_answers_are_learned_behind_the_rendered_prompt(
    preparing: Callable[[str], Preparer],
) -> None:
    columns: Json = {"type": "Unpaired"}
    rows: list[Json] = [
        {"prompt": [SKY], "completion": [SKY, GOOD], "label": True},
        {"prompt": [SKY], "completion": [BAD], "label": False},
        {"prompt": [SKY], "completion": [SKY], "label": True},  # adds nothing
        {"prompt": [BRIEF, SKY], "completion": [GOOD], "label": True},
        {"prompt": [BRIEF, SKY], "completion": [GOOD], "label": False},  # judged both ways
    ]
    preparer = preparing(HERMES)
    result = preparer(rows, columns=None, objective={"type": "KTO"}, onTemplateError="Drop")
    assert result.dropped == {"notNull": 0, "dedupe": 0, "onTemplateError": 1}
    trained = Trained(result, preparer.folder / "model", columns)
    assert sorted(zip(trained.texts, trained.learned, strict=True)) == sorted(
        (hermes(*prompt, answer), f"{answer['content']}<|im_end|>\n")
        for prompt, answer in (
            ([DEFAULT, SKY], GOOD),
            ([DEFAULT, SKY], BAD),
            ([BRIEF, SKY], GOOD),
            ([BRIEF, SKY], GOOD),
        )
    )
    assert sorted(trained.tokens) == counted(result)
    assert list(table_of(result)[0]) == [
        *("id", "prompt", "completion", "label", "input_ids", "loss_mask", "tokens", "split")
    ]


@pytest.mark.usefixtures("compiled_plans")
def test_preferences_that_are_conversations_come_through_every_step(
    preparing: Callable[[str], Preparer],
) -> None:
    def row(number: int, good: str = "Blue.", bad: str = "Red.") -> Json:
        prompt = f"Sky {number}?"
        return {
            "prompt": prompt,
            "chosen": [build_message("user", prompt), build_message("assistant", good)],
            "rejected": [build_message("user", prompt), build_message("assistant", bad)],
        }

    call = row(8) | {"chosen": [build_message("user", "Sky 8?"), calling("weather", city="Ulm")]}
    rows = [*(row(number) for number in range(6)), call]
    dirty = [
        row(0, good="BLUE. "),  # the same but for case and white space
        row(1, bad="Green."),  # another preference of the same prompt
        row(2) | {"chosen": []},
        row(3) | {"rejected": [build_message("user", "Sky 3?"), {"role": "assistant", "content": None}]},
        row(4) | {"rejected": [build_message("user", "Sky 4?")]},  # nothing behind the prompt
        row(5) | {"prompt": "Sea?"},  # answers to another prompt
        row(6, good="nowhere " * 200),
        row(7, good="Write to jane@example.com"),
    ]
    preparer = preparing(HERMES)
    result = preparer(
        rows + dirty,
        columns=None,
        objective=DPO,
        onTemplateError="Drop",
        redact=["Email"],
        maxTokens=400,
        minPromptChars=3,
    )
    assert result.dropped == {
        "notNull": 2,
        "minPromptChars": 0,
        "dedupe": 1,
        "onTemplateError": 2,
        "maxTokens": 1,
    }
    trained = Trained(result, preparer.folder / "model", PREFERENCE)
    assert (sorted(trained.tokens), len(trained.tokens)) == (counted(result), 9)
    assert {"Write to <EMAIL><|im_end|>\n", LEARNED_CALL} <= {*trained.learned}


def test_answers_to_another_prompt_fail_the_preparation(preparing: Callable[[str], Preparer]) -> None:
    row = {"prompt": "Sea?", "chosen": [SKY, GOOD], "rejected": [BAD]}
    preparer = preparing(HERMES)
    with pytest.raises(exit_status.DataError) as failed:
        preparer([row], columns=PREFERENCE, objective=DPO)
    assert failed.value.message == (
        f"column chosen of row 1 of {preparer.folder}/corpus-0/0.parquet goes on from the prompt with role user: an answer is the assistant's, alone or after the messages of the "
        "prompt; to drop these rows, set data.prepare.onTemplateError: Drop"
    )


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
