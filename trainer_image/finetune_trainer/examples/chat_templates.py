"""Renders conversations with a chat template: the date that it writes, and the spans that it marks as answers."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from finetune_trainer.examples.template_input import FAILURES, adapt_contents
from finetune_trainer.examples.template_omissions import EXAMPLE_CALL, find_omissions
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.examples.chat_messages import Message


# The function that a template calls for the current date. Source: transformers, chat_template_utils.py, `_compile_jinja_template`.
_CLOCK = "strftime_now"
# The format codes of that function. Source: Python's documentation of strftime; glibc's for codes with '-', which write no leading 0.
_DATE_CODES = [
    f"%{padding}{code}" for padding in ("-", "") for code in "aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    day: date | None = None,
    add_generation_prompt: bool = False,
    is_whole: bool = True,
) -> str:
    """Return a conversation as text.

    Args:
        messages, tools: as `chat_messages` returns them.
        day: the date for templates that write the current date; None: today.
        is_whole: whether the messages end where the conversation does. If they do not, the template may omit reasoning.

    Raises:
        FAILURES: the template refuses the messages, or omits tools, tool calls, their results, the messages of a role, or the reasoning
            of an answer.
    """
    if omissions := find_omissions(tokenizer, messages, tools, is_whole=is_whole):
        raise ValueError(
            f"it does not render {' and '.join(sorted(omissions))}: set model.chatTemplate to one that does"
        )
    return str(
        tokenizer.apply_chat_template(
            adapt_contents(tokenizer, messages),
            tools=tools,
            chat_template=_with_day(tokenizer, tools, day),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    )


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template that may write the current date."""
    return _CLOCK in str(tokenizer.chat_template)


def _with_day(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, day: date | None
) -> str | None:
    """Return the chat template with a fixed date in place of the current one; None: use the template of the tokenizer.

    NB: a caller of transformers cannot pass a function to a template, so a macro replaces `strftime_now`.
    """
    if day is None or not writes_date(tokenizer):
        return None
    # NB: Jinja removes the line end after the macro, so the template still begins at the start of a line.
    return f"{_build_clock_macro(day)}\n{tokenizer.get_chat_template(tools=tools)}"


@lru_cache(maxsize=4)
def _build_clock_macro(day: date) -> str:
    """Build a Jinja macro that formats a date as `strftime` does, by replacing each code with its text."""
    moment = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - it has no time, and so no zone
    # NB: %% stands for a percent sign and begins no code, so a placeholder hides it while the codes are replaced.
    codes = [("%%", "\0"), *((code, moment.strftime(code)) for code in _DATE_CODES), ("\0", "%")]
    replaced = "".join(f".replace({code!r}, {written!r})" for code, written in codes)
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}"


def find_marked_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    day: date | None = None,
) -> list[tuple[int, int]] | None:
    """Return the spans of the rendered conversation that {% generation %} and {% endgeneration %} enclose in the template.

    Each span is (begin, end) in characters, in order. None: the template has no such blocks. `day`: as in `render`.

    Raises:
        FAILURES: the template refuses the conversation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    if not _has_marks(template):
        return None
    # NB: the tokenizer's own method returns token masks only, and one token can lie in two spans.
    _, (marked_spans,) = render_jinja_template(
        [adapt_contents(tokenizer, messages)],
        tools=tools,
        chat_template=_with_day(tokenizer, tools, day) or template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return [(int(begin), int(end)) for begin, end in marked_spans]


def check_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the {% generation %} blocks of a chat template, if it has any, contain text of an answer.

    Raises:
        RecipeRefusedError: the blocks contain no text of an answer.
    """
    question: Message = {"role": "user", "content": "?"}
    answers: list[Message] = [
        {"role": "assistant", "content": "!"},
        {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]},
    ]
    # None: there are no blocks, or the template refuses the answer, so that the answer shows nothing about the blocks.
    spans_of_answers = [_try_find_marked_spans(tokenizer, [question, answer]) for answer in answers]
    rendered_spans = [spans for spans in spans_of_answers if spans is not None]
    if rendered_spans and not any(begin < end for spans in rendered_spans for begin, end in spans):
        raise RecipeRefusedError(
            "the {% generation %} blocks of the chat template contain no part of an answer: put what the assistant says between "
            "{% generation %} and {% endgeneration %} in model.chatTemplate.jinja, or remove the blocks"
        )


def _try_find_marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message]
) -> list[tuple[int, int]] | None:
    """Return the marked spans, or None if the template has no marks or refuses the messages."""
    try:
        return find_marked_spans(tokenizer, messages)
    except FAILURES:
        return None


def has_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of a tokenizer has {% generation %} blocks, other than in comments."""
    return _has_marks(tokenizer.get_chat_template())


@lru_cache(maxsize=4)
def _has_marks(template: str) -> bool:
    """Whether a template has {% generation %} blocks, other than in comments."""
    parts = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]  # noqa: S701 - it renders nothing
    return any(
        kind == "block_begin" and part == ("name", "generation") for (kind, _), part in pairwise(parts)
    )
