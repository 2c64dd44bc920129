"""The input of a chat template: messages with contents in the form that the template expects."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from finetune_trainer.examples.chat_messages import TEXT_PART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.examples.chat_messages import Message

FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""A template is a program that runs over the data; it can raise any of these."""
PROBE_CONTENT = "probed_content"
"""The content of test messages: a template renders contents if the rendered text contains it."""


def adapt_contents(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents have the form that the template expects: text, or lists of parts."""
    if not _expects_parts(tokenizer, str(tokenizer.chat_template)):
        return [*messages]
    return [message | {"content": _as_parts(message["content"])} for message in messages]


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": TEXT_PART, "text": text}]


@lru_cache(maxsize=4)
def _expects_parts(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Whether a template renders contents that are lists of parts, and omits contents that are text.

    Args:
        _template: the tokenizer's template, as a key of the cache: a tokenizer may get another template.
    """
    from_text = try_render(tokenizer, [{"role": "user", "content": PROBE_CONTENT}], tools=None) or ""
    from_parts = (
        try_render(tokenizer, [{"role": "user", "content": _as_parts(PROBE_CONTENT)}], tools=None) or ""
    )
    return PROBE_CONTENT not in from_text and PROBE_CONTENT in from_parts


def try_render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None
) -> str | None:
    """Return a conversation as the template renders it, or None if the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except FAILURES:
        return None
