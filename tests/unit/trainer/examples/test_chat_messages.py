"""Messages and tools as chat templates take them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_trainer.examples import chat_messages

Json = dict[str, Any]
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def called(calls: Any, **fields: Any) -> Json:
    return {"role": "assistant", "tool_calls": calls} | fields


def with_arguments(arguments: Any) -> list[Json]:
    return [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]


# What a row has, and what a template gets.
MESSAGES: dict[str, tuple[Json, Json]] = {
    "fields without a value": (
        {"role": "user", "content": "hi", "name": None, "tool_calls": None, "tool_call_id": None},
        {"role": "user", "content": "hi"},
    ),
    "a call as a structure": (called([CALL], content=None), called([CALL], content="")),
    "a call as JSON text": (called(json.dumps([CALL]), content=""), called([CALL], content="")),
    "no calls": (called([], content="hi"), {"role": "assistant", "content": "hi"}),
    "no calls as text": (called("[]", content="hi"), {"role": "assistant", "content": "hi"}),
    "arguments as JSON text": (called(with_arguments('{"city": "Ulm"}')), called([CALL], content="")),
    "no arguments": (called(with_arguments("")), called(with_arguments({}), content="")),
    "a call without its wrapper": (
        called([{"name": "weather", "arguments": '{"city": "Ulm"}'}]),
        called([CALL["function"]], content=""),
    ),
    "arguments of other rows": (
        called(with_arguments({"city": "Ulm", "zip": None, "days": [{"at": None, "on": 1}]})),
        called(with_arguments({"city": "Ulm", "days": [{"on": 1}]}), content=""),
    ),
    "parts": (
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi."}, {"type": "text", "text": "Who?", "image_url": None}],
        },
        {"role": "user", "content": "Hi.\nWho?"},
    ),
    "parts that are text": (
        {"role": "user", "content": ["Hi.", {"text": "Who?"}]},
        {"role": "user", "content": "Hi.\nWho?"},
    ),
    "numbers as parts": (
        {"role": "user", "content": [{"type": "text", "text": 18}, 0.5, True]},
        {"role": "user", "content": "18\n0.5\ntrue"},
    ),
    "no parts": ({"role": "user", "content": []}, {"role": "user", "content": ""}),
    "what a tool returned": (
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "weather"},
    ),
}


@pytest.mark.parametrize(("given", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_as_a_template_takes_it(given: Json, expected: Json) -> None:
    assert chat_messages.messages([given]) == [expected]


WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "tool_calls of message 2 are not JSON"),
    "no list": ('{"name": "a"}', "tool_calls of message 2 are not a list of calls"),
    "texts": (["weather"], "tool_calls of message 2 are not a list of calls"),
    "arguments that are no JSON": (
        with_arguments("city=Ulm"),
        "arguments in tool_calls of message 2 are not JSON",
    ),
    "arguments without names": (
        with_arguments('["Ulm"]'),
        "arguments in tool_calls of message 2 are not a JSON object",
    ),
}


@pytest.mark.parametrize(("calls", "sentence"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_calls_of_another_shape(calls: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chat_messages.messages([{"role": "user", "content": "hi"}, called(calls)])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "image_url"),
        ({"type": "input_audio", "text": "hm"}, "input_audio"),
    ],
)
def test_parts_that_are_not_text(part: Any, kind: str) -> None:
    with pytest.raises(
        ValueError, match=f"^message 2 has a part of type {kind}, but only text parts can be trained on$"
    ):
        chat_messages.messages(
            [{"role": "user", "content": "hi"}, {"role": "user", "content": ["What?", part]}]
        )


# Messages of other formats, and as ours.
RENAMED: dict[str, tuple[Any, Any]] = {
    "ShareGPT": (
        [
            {"from": "human", "value": "hi", "weight": 0},
            {"from": "gpt", "value": "ho"},
            {"from": "system", "value": "be"},
        ],
        [
            {"role": "user", "content": "hi", "weight": 0},
            {"role": "assistant", "content": "ho"},
            {"role": "system", "content": "be"},
        ],
    ),
    "a call of before tool_calls": (
        [
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "content": "7"},
        ],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": CALL["function"]}],
            },
            {"role": "tool", "content": "7"},
        ],
    ),
    "such a call as JSON text": (
        [{"role": "assistant", "content": "", "function_call": '{"name": "a"}'}],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": '[{"type": "function", "function": {"name": "a"}}]',
            }
        ],
    ),
    "a call without a name": (
        [{"role": "assistant", "content": "a", "function_call": {"name": None, "arguments": None}}],
        [{"role": "assistant", "content": "a"}],
    ),
    "empty text in place of a call": (
        [{"role": "assistant", "content": "a", "function_call": text} for text in ("", " ", "null", "{}")],
        [{"role": "assistant", "content": "a"}] * 4,
    ),
    "no call": (
        [{"role": "assistant", "content": "a", "function_call": None}],
        [{"role": "assistant", "content": "a"}],
    ),
    "its roles alone": ([{"role": "human", "content": "hi"}], [{"role": "user", "content": "hi"}]),
    "its fields beside ours that have no value": (
        [{"from": "gpt", "value": "ho", "role": None, "content": None}],
        [{"role": "assistant", "content": "ho"}],
    ),
    "ours": (
        [{"role": "tool", "content": "7", "from": "it"}],
        [{"role": "tool", "content": "7", "from": "it"}],
    ),
    "roles that are not text": (
        [{"role": ["human"], "content": "hi"}, {"from": {"name": "gpt"}, "value": "ho"}],
        [{"role": ["human"], "content": "hi"}, {"role": {"name": "gpt"}, "content": "ho"}],
    ),
    "no messages": (["hi", {"to": "you"}], ["hi", {"to": "you"}]),
    "text": ("hi", "hi"),
}


@pytest.mark.parametrize(("given", "expected"), RENAMED.values(), ids=RENAMED)
def test_names_of_other_formats(given: Any, expected: Any) -> None:
    assert chat_messages.rename(given) == expected


@pytest.mark.parametrize("part", [{"type": "text", "text": None}, {"type": "text"}, None])
def test_text_parts_without_a_text(part: Any) -> None:
    with pytest.raises(ValueError, match="message 1 has a text part without a text"):
        chat_messages.messages([{"role": "user", "content": ["What?", part]}])


def test_weights_are_told_apart_from_messages() -> None:
    given = [True, False, 1, 0, 1.0, 0.0, "1", "0", " True", "FALSE", "1.0", "0.0", None]
    messages = [{"role": "assistant", "content": "a", "learned": value, "weight": 0} for value in given]
    others = [turn | {"learned": value} for turn in build_turns("s", "u") for value in (None, 0, 0.5, "no")]
    plain, learned = chat_messages.weighed([*messages, *others], "learned")
    assert plain == [{"role": "assistant", "content": "a", "weight": 0}] * len(given) + [
        turn for turn in build_turns("s", "u") for _ in range(4)
    ]
    # Those of other roles say nothing.
    assert learned == [True, False] * 6 + [True] + [True] * len(others)


@pytest.mark.parametrize("value", [2, 0.5, -1, "yes", "", [1], {}])
def test_what_is_no_weight(value: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"weight of message 2 is .*, but must be 1 \(the message is learned\) or 0 \(it is not\)",
    ):
        chat_messages.weighed([*build_turns("u"), {"role": "assistant", "weight": value}], "weight")


def in_order(value: Any) -> str:
    return json.dumps(value)


TOOLS: dict[str, tuple[Any, list[Json] | None]] = {
    "a structure": ([TOOL], [TOOL]),
    "JSON text": (json.dumps([TOOL]), [TOOL]),
    "sorted keys": (json.dumps([TOOL], sort_keys=True), [TOOL]),
    "without the wrapper": (
        [{"parameters": {"properties": {}, "type": "object"}, "name": "now"}],
        [{"name": "now", "parameters": {"type": "object", "properties": {}}}],
    ),
    "keys of other rows": ([TOOL | {"strict": None}], [TOOL]),
    "a null that the text has": ('[{"name": "a", "default": null}]', [{"name": "a", "default": None}]),
    "none": (None, None),
    "an empty list": ([], None),
    "an empty list as text": ("[]", None),
    "an empty text": (" ", None),
}


@pytest.mark.parametrize(("given", "expected"), TOOLS.values(), ids=TOOLS)
def test_tools_as_a_template_takes_them(given: Any, expected: list[Json] | None) -> None:
    """Also in the order of their keys, which templates write."""
    assert in_order(chat_messages.tools(given)) == in_order(expected)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("{", "tools are not JSON"),
        ('["weather"]', "tools are not a list of definitions"),
        ('{"name": "weather"}', "tools are not a list of definitions"),
    ],
)
def test_tools_of_another_shape(given: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chat_messages.tools(given)


def build_turns(*turns: str) -> list[Json]:
    """Messages of the roles that begin with s, u and a."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


REPLIES: dict[str, tuple[list[Json], list[Json], list[Json]]] = {
    "the answer alone": (build_turns("u1"), build_turns("a1"), build_turns("a1")),
    "behind the prompt": (build_turns("u1"), build_turns("u1", "a1"), build_turns("a1")),
    "behind the prompt without its system turn": (
        build_turns("s1", "u1"),
        build_turns("u1", "a1"),
        build_turns("a1"),
    ),
    "behind the whole prompt": (build_turns("s1", "u1"), build_turns("s1", "u1", "a1"), build_turns("a1")),
    "several turns": (
        build_turns("u1", "a1", "u2"),
        build_turns("a2", "u3", "a3"),
        build_turns("a2", "u3", "a3"),
    ),
    "nothing": (build_turns("u1"), build_turns("u1"), []),
}


@pytest.mark.parametrize(("prompt", "answer", "expected"), REPLIES.values(), ids=REPLIES)
def test_what_an_answer_adds(prompt: list[Json], answer: list[Json], expected: list[Json]) -> None:
    assert chat_messages.reply(prompt, answer) == expected


def test_an_answer_to_another_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="begins its answer with a message of role user"):
        chat_messages.reply(build_turns("u1"), build_turns("u2", "a1"))


def test_strings_and_numbers_of_json_change_and_it_stays_json() -> None:
    text = '[{"a": "x1", "1": 11, "b": [true, null, 2.1], "arguments": "{\\"c\\": 31, \\"d\\": \\"y\\"}"}]'

    def change(value: str) -> str:
        return value.replace("1", "<ONE>")

    assert json.loads(chat_messages.with_texts(text, change)) == [
        {
            "a": "x<ONE>",
            "1": "<ONE><ONE>",
            "b": [True, None, "2.<ONE>"],
            "arguments": '{"c": "3<ONE>", "d": "y"}',
        }
    ]


DEEPEST, DEEP = "[" * 200_000 + "]" * 200_000, "[" * 600 + '"x"' + "]" * 600


@pytest.fixture
def default_recursion_limit() -> Iterator[None]:
    """Libraries raise the limit of the process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("default_recursion_limit")
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"function_call": DEEPEST}, "tool_calls of message 1 are not JSON"),
        ({"tool_calls": f'[{{"function": {DEEP}}}]'}, "the JSON is nested too deeply"),
    ],
    ids=["to parse", "to read"],
)
def test_calls_that_are_nested_too_deeply_are_refused(message: dict[str, str], reason: str) -> None:
    conversation = [{"role": "assistant", "content": "", **message}]
    with pytest.raises(ValueError, match=f"^{reason}$"):
        chat_messages.messages(chat_messages.rename(conversation))


@pytest.mark.usefixtures("default_recursion_limit")
@pytest.mark.parametrize("text", [DEEPEST, DEEP], ids=["to parse", "to change"])
def test_texts_in_json_that_is_nested_too_deeply_are_not_changed(text: str) -> None:
    with pytest.raises(ValueError, match=r"^the JSON is nested too deeply$"):
        chat_messages.with_texts(text, str.upper)
