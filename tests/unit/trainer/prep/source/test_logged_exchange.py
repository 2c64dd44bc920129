"""What is read of logged requests and responses: real shapes of endpoints, and texts that are no exchange."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.prep.source.logged_exchange import Exchange, Message, UnusableError, parse_exchange

Json = dict[str, Any]
USER = Message("user", "Open today?")
QUESTION: Json = {"role": "user", "content": "Open today?"}
CHAT: Json = {"messages": [QUESTION], "max_tokens": 50}


def answer(content: Any = "Yes.", **choice: Any) -> Json:
    """A chat completion with one choice."""
    message = {"role": "assistant", "content": content}
    return {"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"} | choice]}


def chunk(end: str | None = None, **delta: Any) -> Json:
    """A chunk of a streamed chat completion."""
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": end}],
    }


CHUNKS = [
    chunk(role="assistant", content=""),
    chunk(content="Ye\u2028"),
    chunk(content="s."),
    chunk("stop"),
    {"choices": [], "usage": {"total_tokens": 9}},
]
CALL = [{"id": "1", "type": "function", "function": {"name": "hours", "arguments": "{}"}}]
SPOKEN = Exchange([USER], "Yes.", is_finished=True)
STREAMED = Exchange([USER], "Ye\u2028s.", is_finished=True)

EXCHANGES: dict[str, tuple[Any, Any, Exchange]] = {
    "chat": (CHAT, answer(), SPOKEN),
    "a conversation, with old names and contents in parts": (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "gpt", "value": "Hello."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Open"}, {"type": "text", "text": "today?"}],
                },
            ]
        },
        answer([{"type": "text", "text": "Yes."}]),
        Exchange(
            [
                Message("system", "Be brief."),
                Message("user", "Hi"),
                Message("assistant", "Hello."),
                Message("user", "Open\ntoday?"),
            ],
            "Yes.",
            is_finished=True,
        ),
    ),
    "no answer": (CHAT, answer(None), Exchange([USER], "", is_finished=True)),
    "cut off": (CHAT, answer(finish_reason="length"), Exchange([USER], "Yes.", is_finished=False)),
    "an answer without its end's reason": (CHAT, answer(finish_reason=None), SPOKEN),
    "completion": (
        {"prompt": "Open today?", "max_tokens": 5},
        {"choices": [{"text": "Yes.", "index": 0, "finish_reason": "stop"}]},
        SPOKEN,
    ),
    "completion of a list with one prompt": (
        {"prompt": ["Open today?"]},
        {"choices": [{"text": "Yes.", "finish_reason": "content_filter"}]},
        Exchange([USER], "Yes.", is_finished=False),
    ),
    "a streamed completion": (
        {"prompt": "Open today?", "stream": True},
        [{"choices": [{"text": "Ye", "index": 0}]}, {"choices": [{"text": "s.", "finish_reason": "stop"}]}],
        SPOKEN,
    ),
    "a list of chunks": (CHAT, CHUNKS, STREAMED),
    "a chunk in each line": (CHAT, "\n".join(json.dumps(item) for item in CHUNKS), STREAMED),
    "server-sent events": (
        CHAT,
        ": ping\n\n"
        + "".join(f"event: message\ndata: {json.dumps(item, ensure_ascii=False)}\r\n\r\n" for item in CHUNKS)
        + "data: [DONE]\n\n",
        STREAMED,
    ),
    "one event": (CHAT, f"data: {json.dumps(chunk('stop', content='Yes.'))}", SPOKEN),
    "a stream without an end": (CHAT, CHUNKS[:3], Exchange([USER], "Ye\u2028s.", is_finished=False)),
    "inputs of an MLflow chat model": ({"inputs": {"messages": [QUESTION]}}, answer(), SPOKEN),
    "inputs with a name, and predictions": (
        {"inputs": {"instruction": "Open today?"}, "params": {"top_k": 1}},
        {"predictions": ["Yes."]},
        SPOKEN,
    ),
    "a text as inputs": ({"inputs": ["Open today?"]}, {"predictions": "Yes."}, SPOKEN),
    "instances": ({"instances": [{"prompt": "Open today?"}]}, {"predictions": [answer()]}, SPOKEN),
    "records": ({"dataframe_records": [{"messages": [QUESTION]}]}, answer(), SPOKEN),
    "a split frame": (
        {"dataframe_split": {"columns": ["prompt", "n"], "data": [["Open today?", 1]]}},
        {"predictions": ["Yes."]},
        SPOKEN,
    ),
}
DEEP = "[" * 200_000
UNUSABLE: dict[str, tuple[Any, Any, str]] = {
    "no JSON": ("{", answer(), "unreadable"),
    "half of a character": ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', answer(), "unreadable"),
    "too deep": (DEEP, answer(), "unreadable"),
    "a response that is cut": (CHAT, json.dumps(answer())[:-3], "unreadable"),
    "an empty response": (CHAT, "", "unreadable"),
    "only comments": (CHAT, ": ping\n\ndata: [DONE]", "unreadable"),
    "embeddings": ({"input": "Open today?"}, {"data": [{"embedding": [0.1]}]}, "unknownShape"),
    "several inputs": ({"inputs": {"a": "b", "c": "d"}}, answer(), "unknownShape"),
    "text": ('"Open today?"', answer(), "unknownShape"),
    "no messages": ({"messages": []}, answer(), "unknownShape"),
    "a message without a role": ({"messages": [{"content": "Hi"}]}, answer(), "unknownShape"),
    "a message without content": ({"messages": [{"role": "user"}]}, answer(), "unknownShape"),
    "messages that are text": ({"messages": ["Hi"]}, answer(), "unknownShape"),
    "an answer to go on with": (
        {"messages": [QUESTION, {"role": "assistant", "content": "Ye"}]},
        answer(),
        "unknownShape",
    ),
    "an error": (CHAT, {"error_code": "BAD_REQUEST"}, "unknownShape"),
    "an error in a stream": (CHAT, [*CHUNKS[:2], {"error": "away"}], "unknownShape"),
    "no choice": (CHAT, {"choices": []}, "unknownShape"),
    "chunks without a choice": (CHAT, CHUNKS[-1:], "unknownShape"),
    "a choice without a text": (CHAT, {"choices": [{"index": 0}]}, "unknownShape"),
    "a frame of other columns": (
        {"dataframe_split": {"columns": ["a"], "data": [["b", "c"]]}},
        answer(),
        "unknownShape",
    ),
    "several prompts": ({"prompt": ["a", "b"]}, answer(), "severalAnswers"),
    "several choices": (CHAT, {"choices": answer()["choices"] * 2}, "severalAnswers"),
    "several streams": (CHAT, [*CHUNKS, {"choices": [{"index": 1, "delta": {}}]}], "severalAnswers"),
    "several predictions": ({"inputs": "a"}, {"predictions": ["b", "c"]}, "severalAnswers"),
    "tools": (CHAT | {"tools": [{"type": "function"}]}, answer(), "toolCalls"),
    "functions": (CHAT | {"functions": [{"name": "hours"}]}, answer(), "toolCalls"),
    "a call before": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": CALL}, QUESTION]},
        answer(),
        "toolCalls",
    ),
    "the result of a tool": ({"messages": [{"role": "function", "content": "9"}]}, answer(), "toolCalls"),
    "a call": (CHAT, answer(message={"role": "assistant", "tool_calls": CALL}), "toolCalls"),
    "an old call": (CHAT, answer(message={"function_call": {"name": "hours"}}), "toolCalls"),
    "a streamed call": (CHAT, [chunk(tool_calls=CALL), chunk("tool_calls")], "toolCalls"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        answer(),
        "notText",
    ),
    "thoughts beside an answer": (
        CHAT,
        answer([{"type": "reasoning", "summary": []}, {"type": "text", "text": "Yes."}]),
        "notText",
    ),
    "tokens": ({"prompt": [5]}, answer(), "unknownShape"),
}


def write(value: Any) -> str:
    """JSON text of a value that is not text already."""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("case", EXCHANGES)
def test_an_exchange_is_read(case: str) -> None:
    request, response, exchange = EXCHANGES[case]
    assert parse_exchange(write(request), write(response)) == exchange


@pytest.mark.parametrize("case", UNUSABLE)
def test_other_texts_have_a_reason(case: str) -> None:
    request, response, reason = UNUSABLE[case]
    with pytest.raises(UnusableError) as failure:
        parse_exchange(write(request), write(response))
    assert failure.value.reason == reason


KEYS = (
    "messages",
    "role",
    "content",
    "tool_calls",
    "function_call",
    "prompt",
    "inputs",
    "choices",
    "message",
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KEYS, "delta", "text", "type", "index", "predictions"]), values, max_size=4
        )
    ),
    max_leaves=12,
)


@given(request=ANYTHING, response=ANYTHING)
def test_no_value_is_an_error_of_another_kind(request: Any, response: Any) -> None:
    for asked in (request, CHAT):
        try:
            exchange = parse_exchange(write(asked), write(response))
        except UnusableError:
            continue
        assert isinstance(exchange.answer, str)
