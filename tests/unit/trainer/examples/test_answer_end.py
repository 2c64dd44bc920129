"""The token that ends an answer: in chat templates, and in what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from finetune_crds.chat import ChatTemplate
from finetune_trainer.examples import answer_end
from finetune_trainer.examples.tokenizer import load_tokenizer
from support import networks

CHATML = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
# Source: the tokenizer of Phi-3-mini-4k-instruct, of which this is the part without system turns.
PHI3 = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{%- else %}
{{ eos_token }}
{%- endif %}
"""
UPPER = "{% for message in messages %}{{ message['content'] | upper + '<|end|>' }}{% endfor %}"
NONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SEVERAL = "the chat template ends an answer with '<|im_end|>', which is several tokens of this tokenizer, "
# A chat template, special tokens and other tokens of the tokenizer, the token that ends an answer, and what is told.
ENDS: dict[str, tuple[str | None, list[str], list[str], str | None, str]] = {
    "no template": (None, [], [], None, ""),
    "a special token": (CHATML, ["<|im_end|>"], [], "<|im_end|>", ""),
    "a new token": (CHATML, [], ["<|im_end|>"], "<|im_end|>", ""),
    "several tokens": (CHATML, [], [], None, SEVERAL),
    "a special token before the end of text": (PHI3, ["<|end|>"], [], "<|end|>", ""),
    "several tokens before the end of text": (
        PHI3,
        [],
        [],
        "<eos>",
        "the chat template ends an answer with '<|end|>', which is several tokens of this tokenizer, ",
    ),
    "a template that changes the answer": (UPPER, ["<|end|>"], [], None, ""),
    "nothing": (NONE, [], [], None, ""),
}


@pytest.fixture
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(networks.recipe(base_model).model, base_model)


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_an_answer(tokenizer: PreTrainedTokenizerBase, case: str) -> None:
    template, special, added, end, sentence = ENDS[case]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    token = answer_end.find_end_token(tokenizer)
    assert (None if token is None else tokenizer.convert_ids_to_tokens(token)) == end
    explained = answer_end.explain_missing_stop(tokenizer)
    assert (explained or "").startswith(sentence)
    assert bool(explained) == bool(sentence)


def test_chat_templates_by_name_end_with_one_token_of_their_family(base_model: Path) -> None:
    ends = {"ChatML": "<|im_end|>", "Llama3": "<|eot_id|>"}
    end_tokens = {}
    for name, token in ends.items():
        model = networks.recipe(base_model).model.model_copy(
            update={"chat_template": ChatTemplate.model_validate({"type": name}), "new_tokens": [token]}
        )
        tokenizer = load_tokenizer(model, base_model)
        end_tokens[name] = tokenizer.convert_ids_to_tokens(answer_end.find_end_token(tokenizer))
    assert end_tokens == ends
