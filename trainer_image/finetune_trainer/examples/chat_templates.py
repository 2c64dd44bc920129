"""Chat templates by name, for models whose tokenizer has none or another one.

Each renders the beginning of a conversation in the same way once it goes on, so that training can tell answers from prompts.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError

from finetune_trainer.examples.chat_messages import REASONING, TEXT_PART
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.chat import ChatTemplate
    from finetune_trainer.examples.chat_messages import Message

# A template is a program that runs over the data; it can raise any of these.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)

# Source: the chat format of OpenAI (ChatML), as Qwen's and many other tokenizers have it.
_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Source: Meta's model card of Llama 3, section "Prompt format".
_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Source: the tokenizer of Mistral-7B-Instruct-v0.3; a system turn becomes the beginning of the first prompt.
_MISTRAL = """\
{% set start = namespace(system='') %}
{% if messages and messages[0]['role'] == 'system' %}
{% set start.system = messages[0]['content'] + '\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set turns = messages %}
{% endif %}
{{ bos_token }}
{%- for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] %}
{{ raise_exception('after an optional system turn, the roles must be user and assistant in turns') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + (start.system if loop.first else '') + message['content'] + '[/INST]' }}
{%- else %}
{{ ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{% endfor %}
"""

# Source: the prompt of Stanford Alpaca, with a line end behind "Response:"; a system turn replaces its first sentences.
_ALPACA = """\
{% set start = namespace(system='Below is an instruction that describes a task. \
Write a response that appropriately completes the request.') %}
{% if messages and messages[0]['role'] == 'system' %}
{% set start.system = messages[0]['content'] %}
{% set turns = messages[1:] %}
{% else %}
{% set turns = messages %}
{% endif %}
{{ bos_token }}{{ start.system + '\\n\\n' }}
{%- for message in turns %}
{% if message['role'] == 'user' %}
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- else %}
{{ raise_exception('after an optional system turn, the roles must be user and assistant') }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '### Response:\\n' }}
{%- endif %}
"""

_TEMPLATES = {"ChatML": _CHATML, "Llama3": _LLAMA3, "Mistral": _MISTRAL, "Alpaca": _ALPACA}


def set_template(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer another chat template.

    Raises:
        RecipeRefusedError: the recipe's own is no Jinja template.
    """
    tokenizer.chat_template = template.jinja if template.jinja is not None else _TEMPLATES[template.type]
    if template.jinja is None:
        return
    try:
        # NB: rendering compiles it, in the sandbox and with the extensions of conversations.
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise RecipeRefusedError(
            f"model.chatTemplate.jinja is not a Jinja template: line {error.lineno}: {error.message}"
        ) from error
    except FAILURES:
        # A template may refuse this conversation and take those of the data.
        pass


# What a template calls for the date of today. Source: transformers, chat_template_utils.py, `_compile_jinja_template`.
_CLOCK = "strftime_now"
# The codes of its formats. Source: Python's documentation of strftime, and glibc's for those without a leading 0.
_DATE_CODES = [
    f"%{padding}{code}" for padding in ("-", "") for code in "aAbBcCdDeFfgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"
]
# What a template may leave out, as messages call it.
_TOOLS, _CALLS, _RESULTS = "tools", "tool calls", "messages of role tool"
# What ends the reasoning in the content of an answer.
_THOUGHT = "</think>"
# What shows whether it does: a definition and a call as clients send them, and without their wrapper.
_TOOL, _CALL, _RESULT, _CONTENT = "probed_tool", "probed_call", "probed_result", "probed_content"
# Roles that every template knows, or that are looked at with the calls of tools.
_ROLES_OF_ALL = {"user", "assistant", "tool"}
_DEFINITION = {
    "name": _TOOL,
    "description": "A tool.",
    "parameters": {"type": "object", "properties": {}},
}
_CALLED = {"name": _CALL, "arguments": {}}
# NB: Mistral's templates want ids of nine letters and digits.
_ID = "a1b2c3d4e"
_PROBES = (
    ({"type": "function", "function": _DEFINITION}, {"id": _ID, "type": "function", "function": _CALLED}),
    (_DEFINITION, _CALLED),
)


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
        messages, tools: as `turns` makes them.
        day: the one that a template writes which writes the date; None: today.
        is_whole: whether it ends where the conversation does. A template may leave out the reasoning of a beginning of it once it goes
            on.

    Raises:
        FAILURES: the template does not take it, or leaves out tools, tool calls, what a tool returned, the messages of a role, or the
            reasoning before an answer.
    """
    if left_out := _find_left_out(tokenizer, messages, tools, is_whole=is_whole):
        raise ValueError(
            f"it does not render {' and '.join(sorted(left_out))}: set model.chatTemplate to one that does"
        )
    return str(
        tokenizer.apply_chat_template(
            _adapt_contents(tokenizer, messages),
            tools=tools,
            chat_template=_with_day(tokenizer, tools, day),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    )


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of a tokenizer, if it has one, may write the date of the day on which it is rendered."""
    return _CLOCK in str(tokenizer.chat_template)


def _with_day(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None, day: date | None
) -> str | None:
    """The chat template with a day in place of today; None: as the tokenizer has it.

    NB: transformers passes no functions on to a template, so a macro stands in for its own.
    """
    if day is None or not writes_date(tokenizer):
        return None
    # NB: the line end after the macro is part of it for Jinja, and what follows begins a line, as without it.
    return f"{_build_clock_macro(day)}\n{tokenizer.get_chat_template(tools=tools)}"


@lru_cache(maxsize=4)
def _build_clock_macro(day: date) -> str:
    """A macro that formats the beginning of a day, as `strftime` does it."""
    moment = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - it has no time, and so no zone
    # NB: two signs are one that begins no code, so they are out of the way until the codes are replaced.
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
    """Return the parts of a conversation as text that are between {% generation %} and {% endgeneration %} in its template.

    They are (begin, end) in characters, in order. None: the template has no such blocks. `day`: as in `render`.

    Raises:
        FAILURES: the template does not take the conversation.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    if not _has_marks(template):
        return None
    # NB: the tokenizer's own method gives tokens alone, in which a token can be of two parts.
    _, (marked_spans,) = render_jinja_template(
        [_adapt_contents(tokenizer, messages)],
        tools=tools,
        chat_template=_with_day(tokenizer, tools, day) or template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return [(int(begin), int(end)) for begin, end in marked_spans]


def check_marks(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the {% generation %} blocks of a chat template hold something of an answer, if it has such blocks.

    Raises:
        RecipeRefusedError: they hold nothing.
    """
    question: Message = {"role": "user", "content": "?"}
    answers: list[Message] = [
        {"role": "assistant", "content": "!"},
        {"role": "assistant", "content": "", "tool_calls": [_PROBES[0][1]]},
    ]
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
    """The marked parts, or None where there are no marks, or the template refuses the messages."""
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
        before[0] == "block_begin" and part == ("name", "generation") for before, part in pairwise(parts)
    )


def _adapt_contents(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Messages with contents as the template expects them: text, or lists of parts."""
    if not _expects_parts(tokenizer, str(tokenizer.chat_template)):
        return [*messages]
    return [message | {"content": _as_parts(message["content"])} for message in messages]


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": TEXT_PART, "text": text}]


@lru_cache(maxsize=4)
def _expects_parts(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Whether a template renders contents that are lists of parts, and leaves out those that are text.

    Args:
        _template: the tokenizer's; it is part of the key of the cache.
    """
    as_text, as_parts = (
        _try_render(tokenizer, [{"role": "user", "content": content}], None)
        for content in (_CONTENT, _as_parts(_CONTENT))
    )
    return _CONTENT not in (as_text or "") and _CONTENT in (as_parts or "")


def renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of a tokenizer renders definitions of tools."""
    return _TOOLS not in _find_ignored(tokenizer, str(tokenizer.chat_template))


def _find_left_out(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    is_whole: bool,
) -> set[str]:
    """What a conversation has and its template leaves out without a word."""
    template = str(tokenizer.chat_template)
    used = _find_used(messages, tools)
    left_out = used & _find_ignored(tokenizer, template) if used else set()
    left_out |= {
        f"messages of role {role}"
        for role in _list_unusual_roles(messages)
        if _drops_role(tokenizer, template, role)
    }
    return left_out | (_find_dropped_reasoning(tokenizer, template, messages) if is_whole else set())


def _find_used(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> set[str]:
    used = {_TOOLS} if tools else set()
    used |= {_CALLS} if any("tool_calls" in message for message in messages) else set()
    return used | ({_RESULTS} if any(message["role"] == "tool" for message in messages) else set())


def _list_unusual_roles(messages: Sequence[Message]) -> set[str]:
    """The roles that a template may not know."""
    return {str(message["role"]) for message in messages} - _ROLES_OF_ALL


def _find_dropped_reasoning(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message]
) -> set[str]:
    """The reasoning of the last message that a template leaves out: that of earlier ones it leaves out on purpose.

    Some servers write the same reasoning into two fields; one of them is enough.
    """
    last = messages[-1] if messages else {}
    texts = {field: last[field] for field in REASONING if last.get(field)}
    dropped = {field for field in texts if _drops_reasoning(tokenizer, template, field)}
    rendered = [texts[field] for field in texts if field not in dropped]
    left_out = {field for field in dropped if texts[field] not in rendered}
    is_answer = last.get("role") == "assistant"
    if is_answer and _THOUGHT in str(last.get("content")) and _drops_thought(tokenizer, template):
        left_out.add(f"what an answer has before {_THOUGHT}")
    return left_out


@lru_cache(maxsize=32)
def _drops_role(tokenizer: PreTrainedTokenizerBase, _template: str, role: str) -> bool:
    """Whether a template leaves out the messages of a role without a word."""
    exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    return _leaves_out(tokenizer, [{"role": role, "content": _CONTENT}, *exchange])


@lru_cache(maxsize=32)
def _drops_reasoning(tokenizer: PreTrainedTokenizerBase, _template: str, field: str) -> bool:
    """Whether a template leaves out a field with the reasoning before the last answer without a word."""
    answer = {"role": "assistant", "content": "!", field: _CONTENT}
    return _leaves_out(tokenizer, [{"role": "user", "content": "?"}, answer])


@lru_cache(maxsize=4)
def _drops_thought(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Whether a template leaves out reasoning in the content of the last answer without a word."""
    answer = {"role": "assistant", "content": f"<think>\n{_CONTENT}\n{_THOUGHT}\n\n!"}
    return _leaves_out(tokenizer, [{"role": "user", "content": "?"}, answer])


def _leaves_out(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> bool:
    text = _try_render(tokenizer, _adapt_contents(tokenizer, messages), None)
    return text is not None and _CONTENT not in text


@lru_cache(maxsize=4)
def _find_ignored(tokenizer: PreTrainedTokenizerBase, _template: str) -> frozenset[str]:
    """What a template leaves out of the text without a word. What it refuses is not part of this.

    Args:
        _template: the tokenizer's; it is part of the key of the cache.
    """
    return frozenset.intersection(*(_probe(tokenizer, *probe) for probe in _PROBES))


def _probe(tokenizer: PreTrainedTokenizerBase, tool: dict[str, Any], call: dict[str, Any]) -> frozenset[str]:
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!"}
    used: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "name": _CALL, "tool_call_id": _ID},
    ]
    defined = _try_render(tokenizer, _adapt_contents(tokenizer, [question, answer]), [tool])
    called = _try_render(tokenizer, _adapt_contents(tokenizer, [question, *used, answer]), [tool])
    marks = ((_TOOLS, _TOOL, defined), (_CALLS, _CALL, called), (_RESULTS, _RESULT, called))
    return frozenset(what for what, mark, text in marks if text is not None and mark not in text)


def _try_render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]] | None
) -> str | None:
    """What a template makes of a conversation, or None where it refuses it."""
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    except FAILURES:
        return None
