"""The form of contents that a template expects."""

from __future__ import annotations

from finetune_trainer.examples import chat_templates
from support.template_tokenizer import build_tokenizer

# As those of Idefics3 and SmolVLM: they look for parts, and leave out a content that is text.
PARTS = """\
{% for turn in messages %}{{ turn.role }}:
{%- for part in turn.content if part.type == 'text' %} {% generation %}{{ part.text }}{% endgeneration %}{% endfor %};
{% endfor %}"""


def test_a_template_that_expects_parts_gets_them() -> None:
    chat_tokenizer = build_tokenizer(PARTS)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "It."}]
    text = chat_templates.render(chat_tokenizer, turns)
    assert text == "user: Who?;\nassistant: It.;\n"
    spans = chat_templates.find_marked_spans(chat_tokenizer, turns) or []
    assert [text[begin:end] for begin, end in spans] == ["Who?", "It."]
