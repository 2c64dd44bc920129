"""Chat templates by name, as a tokenizer renders them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from finetune_crds.chat import ChatTemplate
from finetune_trainer.examples import chat_templates
from finetune_trainer.pod.exit_status import RecipeRefusedError
from support.tool_templates import TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
]
RENDERED = {
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    "<|im_start|>user\nc?<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n",
    "Llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\na?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nc?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nd<|eot_id|>",
    "Mistral": "<s>[INST] Be brief.\n\na?[/INST] b</s>[INST] c?[/INST] d</s>",
    "Alpaca": "<s>Be brief.\n\n### Instruction:\na?\n\n### Response:\nb</s>\n\n### Instruction:\nc?\n\n### Response:\nd</s>\n\n",
}
ASKED = {
    "ChatML": "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n",
    "Llama3": "<s><|start_header_id|>user<|end_header_id|>\n\na?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Mistral": "<s>[INST] a?[/INST]",
    "Alpaca": "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\na?\n\n### Response:\n",
}


def tokenizer(template: ChatTemplate, **special: str) -> PreTrainedTokenizerBase:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", **special)
    chat_templates.set_template(template, made)
    return made


def named(name: str, **special: str) -> PreTrainedTokenizerBase:
    return tokenizer(ChatTemplate.model_validate({"type": name}), **special)


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_and_its_first_prompt(name: str) -> None:
    chat_tokenizer = named(name, bos_token="<s>")
    prompt = chat_tokenizer.apply_chat_template(TURNS[1:2], tokenize=False, add_generation_prompt=True)
    assert (chat_tokenizer.apply_chat_template(TURNS, tokenize=False), prompt) == (
        RENDERED[name],
        ASKED[name],
    )


@pytest.mark.parametrize("name", RENDERED)
def test_the_beginning_of_a_conversation_stays_once_it_goes_on(name: str) -> None:
    chat_tokenizer = named(name, bos_token="<s>")
    conversation = chat_tokenizer.apply_chat_template(TURNS, tokenize=False)
    for turn in (2, 4):
        before = chat_tokenizer.apply_chat_template(TURNS[:turn], tokenize=False, add_generation_prompt=True)
        through = chat_tokenizer.apply_chat_template(TURNS[: turn + 1], tokenize=False)
        assert (conversation.startswith(through), through.startswith(before)) == (True, True)


@pytest.mark.parametrize("name", RENDERED)
def test_a_tokenizer_without_a_first_token(name: str) -> None:
    assert named(name).apply_chat_template(TURNS, tokenize=False) == RENDERED[name].removeprefix("<s>")


@pytest.mark.parametrize("name", ["Mistral", "Alpaca"])
def test_roles_that_a_template_does_not_know(name: str) -> None:
    with pytest.raises(chat_templates.FAILURES, match="the roles must be user and assistant"):
        named(name).apply_chat_template([*TURNS[:3], {"role": "tool", "content": "4"}], tokenize=False)


def test_a_template_of_ones_own() -> None:
    template = ChatTemplate(
        type="Jinja", jinja="{% for turn in messages %}[{{ turn['content'] }}]{% endfor %}"
    )
    assert tokenizer(template).apply_chat_template(TURNS[:3], tokenize=False) == "[Be brief.][a?][b]"


def test_a_template_that_refuses_a_lone_question_is_used() -> None:
    template = ChatTemplate(type="Jinja", jinja="{{ messages[1]['content'] }}")
    assert tokenizer(template).apply_chat_template(TURNS, tokenize=False) == "a?"


def test_text_that_is_no_template_is_refused() -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        tokenizer(ChatTemplate(type="Jinja", jinja="a\n{% for turn in messages %}"))
    assert refused.value.message.startswith(
        "model.chatTemplate.jinja is not a Jinja template: line 2: Unexpected end"
    )


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
    chat_tokenizer = tokenizer(ChatTemplate(type="Jinja", jinja=TEMPLATES[name]), bos_token="<s>")
    assert chat_templates.renders_tools(chat_tokenizer)
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
    chat_tokenizer = tokenizer(ChatTemplate(type="Jinja", jinja=template))
    with pytest.raises(
        ValueError, match=f"it does not render {what}: set model.chatTemplate to one that does"
    ):
        chat_templates.render(chat_tokenizer, messages, tools)
    assert chat_templates.render(chat_tokenizer, CALLED[3:]) == "No."


# As those of Idefics3 and SmolVLM: they look for parts, and leave out a content that is text.
PARTS = """\
{% for turn in messages %}{{ turn.role }}:
{%- for part in turn.content if part.type == 'text' %} {% generation %}{{ part.text }}{% endgeneration %}{% endfor %};
{% endfor %}"""


def test_a_template_that_expects_parts_gets_them() -> None:
    chat_tokenizer = tokenizer(ChatTemplate(type="Jinja", jinja=PARTS))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It."}]
    text = chat_templates.render(chat_tokenizer, turns)
    assert text == "user: Who?;\nassistant: It.;\n"
    spans = chat_templates.find_marked_spans(chat_tokenizer, turns) or []
    assert [text[begin:end] for begin, end in spans] == ["Who?", "It."]


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
    chat_tokenizer = tokenizer(ChatTemplate(type="Jinja", jinja=template))
    if not dropped:
        assert "a" in chat_templates.render(chat_tokenizer, turns)
        return
    with pytest.raises(
        ValueError, match=f"^it does not render {dropped}: set model.chatTemplate to one that does$"
    ):
        chat_templates.render(chat_tokenizer, turns)


def test_another_template_of_the_same_tokenizer_is_looked_at_anew() -> None:
    chat_tokenizer = tokenizer(ChatTemplate(type="Jinja", jinja=CONTENTS))
    assert not chat_templates.renders_tools(chat_tokenizer)
    chat_templates.set_template(ChatTemplate(type="Jinja", jinja=TEMPLATES["Hermes"]), chat_tokenizer)
    assert chat_templates.renders_tools(chat_tokenizer)
