"""What a template omits from a conversation without an error."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.chat import ChatTemplate
from finetune_trainer.examples import chat_templates, named_templates, template_omissions
from support.template_tokenizer import build_tokenizer
from support.tool_templates import TEMPLATES

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "c1"},
    {"role": "assistant", "content": "No."},
]
WITH_TOOLS = {
    "Hermes": '<|im_start|>system\nYou may call tools.\n<tools>\n{"type": "function", "function": {"name": "weather", '
    '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
    "dry\n</tool_response><|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
    "Llama": '<s><|start_header_id|>user<|end_header_id|>\n\nCall one of these functions.\n\n{\n    "type": "function",\n'
    '    "function": {\n        "name": "weather",\n        "parameters": {\n            "type": "object"\n        }\n    }\n}'
    "\n\nRain?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"dry"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\nNo.<|eot_id|>",
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_template_that_renders_tools(name: str) -> None:
    chat_tokenizer = build_tokenizer(TEMPLATES[name], bos_token="<s>")
    assert template_omissions.renders_tools(chat_tokenizer)
    assert chat_templates.render(chat_tokenizer, CALLED, [WEATHER]) == WITH_TOOLS[name]


# What renders the content of some roles and nothing else.
CONTENTS = "{% for turn in messages if turn.role != 'tool' %}{{ turn.content }}{% endfor %}"
LEFT_OUT: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None, str]] = {
    "tools": (CONTENTS, CALLED[:1], [WEATHER], "tools"),
    "a call": (CONTENTS, CALLED[:2], None, "tool calls"),
    "a result": (CONTENTS, [CALLED[0], CALLED[2]], None, "messages of role tool"),
    "all of them": (CONTENTS, CALLED, [WEATHER], "messages of role tool and tool calls and tools"),
    "calls, where tools are written": (
        "{{ tools or '' }}{% for turn in messages %}{{ turn.content }}{% endfor %}",
        CALLED,
        [WEATHER],
        "tool calls",
    ),
}


@pytest.mark.parametrize(("template", "messages", "tools", "what"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_a_template_would_leave_out_is_refused(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, what: str
) -> None:
    chat_tokenizer = build_tokenizer(template)
    with pytest.raises(
        ValueError, match=f"it does not render {what}: set model.chatTemplate to one that does"
    ):
        chat_templates.render(chat_tokenizer, messages, tools)
    assert chat_templates.render(chat_tokenizer, CALLED[3:]) == "No."


# As Phi-3's first template, which knows neither system turns nor reasoning.
WITHOUT_SYSTEM = """\
{% for turn in messages %}{% if turn.role == 'user' or turn.role == 'assistant' %}<{{ turn.role }}>{{ turn.content }}{% endif %}{% endfor %}"""
THINKING = "{% for turn in messages %}{{ turn.role }}:{{ turn.reasoning_content or '' }}{{ turn.content }};{% endfor %}"
DROPPED: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "a system turn": (WITHOUT_SYSTEM, [{"role": "system", "content": "Be."}], "messages of role system"),
    "a developer's turn": (
        WITHOUT_SYSTEM,
        [{"role": "developer", "content": "Be."}],
        "messages of role developer",
    ),
    "reasoning": (WITHOUT_SYSTEM, [{"role": "assistant", "content": "a", "thinking": "Hm."}], "thinking"),
    "reasoning by another name": (
        THINKING,
        [{"role": "assistant", "content": "a", "thinking": "Hm."}],
        "",
    ),
    "none": (
        THINKING,
        [
            {"role": "developer", "content": "Be."},
            {"role": "assistant", "content": "a", "reasoning_content": "Hm."},
        ],
        "",
    ),
    "the same in two fields": (
        THINKING,
        [{"role": "assistant", "content": "a", "reasoning_content": "Hm.", "reasoning": "Hm."}],
        "",
    ),
    "that of an earlier answer": (
        WITHOUT_SYSTEM,
        [{"role": "assistant", "content": "a", "thinking": "Hm."}, {"role": "user", "content": "b"}],
        "",
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_what_a_template_drops_without_a_word_is_refused(case: str) -> None:
    template, turns, dropped = DROPPED[case]
    chat_tokenizer = build_tokenizer(template)
    if not dropped:
        assert "a" in chat_templates.render(chat_tokenizer, turns)
        return
    with pytest.raises(
        ValueError, match=f"^it does not render {dropped}: set model.chatTemplate to one that does$"
    ):
        chat_templates.render(chat_tokenizer, turns)


def test_another_template_of_the_same_tokenizer_is_looked_at_anew() -> None:
    chat_tokenizer = build_tokenizer(CONTENTS)
    assert not template_omissions.renders_tools(chat_tokenizer)
    named_templates.set_template(ChatTemplate(type="Jinja", jinja=TEMPLATES["Hermes"]), chat_tokenizer)
    assert template_omissions.renders_tools(chat_tokenizer)
