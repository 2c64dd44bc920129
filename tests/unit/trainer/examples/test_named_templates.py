"""Chat templates by name, as a tokenizer renders them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_crds.chat import ChatTemplate
from finetune_trainer.examples import template_input
from finetune_trainer.pod.exit_status import RecipeRefusedError
from support.template_tokenizer import build_tokenizer

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


def named(name: str, **special: str) -> PreTrainedTokenizerBase:
    return build_tokenizer(ChatTemplate.model_validate({"type": name}), **special)


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
    with pytest.raises(template_input.FAILURES, match="the roles must be user and assistant"):
        named(name).apply_chat_template([*TURNS[:3], {"role": "tool", "content": "4"}], tokenize=False)


def test_a_template_of_ones_own() -> None:
    template = ChatTemplate(
        type="Jinja", jinja="{% for turn in messages %}[{{ turn['content'] }}]{% endfor %}"
    )
    assert build_tokenizer(template).apply_chat_template(TURNS[:3], tokenize=False) == "[Be brief.][a?][b]"


def test_a_template_that_refuses_a_lone_question_is_used() -> None:
    template = ChatTemplate(type="Jinja", jinja="{{ messages[1]['content'] }}")
    assert build_tokenizer(template).apply_chat_template(TURNS, tokenize=False) == "a?"


def test_text_that_is_no_template_is_refused() -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        build_tokenizer("a\n{% for turn in messages %}")
    assert refused.value.message.startswith(
        "model.chatTemplate.jinja is not a valid Jinja template: line 2: Unexpected end"
    )
