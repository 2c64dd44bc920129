"""Finds the parts of a conversation that chat templates omit without an error: tools, roles and reasoning."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples.chat_messages import REASONING
from finetune_trainer.examples.template_input import PROBE_CONTENT, adapt_contents, try_render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.examples.chat_messages import Message

# What a template may omit, by its name in messages to the user.
_TOOLS, _CALLS, _RESULTS = "tools", "tool calls", "messages of role tool"
# The end of the reasoning inside the content of an answer.
_THOUGHT_END = "</think>"
# Texts in the probes: a template omits a part of a probe if the rendered probe lacks the text of the part.
_TOOL_TEXT, _CALL_TEXT, _RESULT_TEXT = "probed_tool", "probed_call", "probed_result"
# Roles that `_omits_role` need not check: every template renders user and assistant, and `_probe` checks tool.
_COMMON_ROLES = {"user", "assistant", "tool"}
# The tool in the probes, and its call.
_DEFINITION = {
    "name": _TOOL_TEXT,
    "description": "A tool.",
    "parameters": {"type": "object", "properties": {}},
}
_CALLED = {"name": _CALL_TEXT, "arguments": {}}
# NB: Mistral's templates require ids of nine letters and digits.
_ID = "a1b2c3d4e"
EXAMPLE_CALL = {"id": _ID, "type": "function", "function": _CALLED}
"""A call of a tool, as clients send it."""
# Two forms of a tool and its call: in the wrapper that clients send, and without the wrapper.
_PROBES = (({"type": "function", "function": _DEFINITION}, EXAMPLE_CALL), (_DEFINITION, _CALLED))


def renders_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template of a tokenizer renders definitions of tools."""
    return _TOOLS not in _find_omitted_features(tokenizer, str(tokenizer.chat_template))


def find_omissions(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    *,
    is_whole: bool,
) -> set[str]:
    """Return the names of the parts of a conversation that its template omits without an error.

    Args:
        is_whole: whether the messages end where the conversation does; reasoning is checked only then.
    """
    template = str(tokenizer.chat_template)
    used = _find_used(messages, tools)
    omissions = used & _find_omitted_features(tokenizer, template) if used else set()
    omissions |= {
        f"messages of role {role}"
        for role in _list_unusual_roles(messages)
        if _omits_role(tokenizer, template, role)
    }
    return omissions | (_find_omitted_reasoning(tokenizer, template, messages) if is_whole else set())


def _find_used(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> set[str]:
    used = {_TOOLS} if tools else set()
    used |= {_CALLS} if any("tool_calls" in message for message in messages) else set()
    return used | ({_RESULTS} if any(message["role"] == "tool" for message in messages) else set())


def _list_unusual_roles(messages: Sequence[Message]) -> set[str]:
    """Return the roles that a template possibly omits."""
    return {str(message["role"]) for message in messages} - _COMMON_ROLES


def _find_omitted_reasoning(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message]
) -> set[str]:
    """Name the parts of the last message's reasoning that a template does not render: fields, and the part of the content before `</think>`.

    Templates omit the reasoning of earlier messages on purpose. Some servers write the same reasoning into two fields: rendering one of
    them is enough.
    """
    last = messages[-1] if messages else {}
    texts = {field: last[field] for field in REASONING if last.get(field)}
    omitted = {field for field in texts if _omits_reasoning(tokenizer, template, field)}
    rendered = [texts[field] for field in texts if field not in omitted]
    omissions = {field for field in omitted if texts[field] not in rendered}
    is_answer = last.get("role") == "assistant"
    if is_answer and _THOUGHT_END in str(last.get("content")) and _omits_thought(tokenizer, template):
        omissions.add(f"the reasoning before {_THOUGHT_END}")
    return omissions


# NB: the cached functions get the template only as a part of the key of their cache: a tokenizer may get another template.
@lru_cache(maxsize=32)
def _omits_role(tokenizer: PreTrainedTokenizerBase, _template: str, role: str) -> bool:
    """Whether a template omits the messages of a role without an error."""
    exchange = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    return _omits(tokenizer, [{"role": role, "content": PROBE_CONTENT}, *exchange])


@lru_cache(maxsize=32)
def _omits_reasoning(tokenizer: PreTrainedTokenizerBase, _template: str, field: str) -> bool:
    """Whether a template omits, without an error, a field with the reasoning of the last answer."""
    answer = {"role": "assistant", "content": "!", field: PROBE_CONTENT}
    return _omits(tokenizer, [{"role": "user", "content": "?"}, answer])


@lru_cache(maxsize=4)
def _omits_thought(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Whether a template omits, without an error, the reasoning in the content of the last answer."""
    answer = {"role": "assistant", "content": f"<think>\n{PROBE_CONTENT}\n{_THOUGHT_END}\n\n!"}
    return _omits(tokenizer, [{"role": "user", "content": "?"}, answer])


def _omits(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> bool:
    text = try_render(tokenizer, adapt_contents(tokenizer, messages), tools=None)
    return text is not None and PROBE_CONTENT not in text


@lru_cache(maxsize=4)
def _find_omitted_features(tokenizer: PreTrainedTokenizerBase, _template: str) -> frozenset[str]:
    """Return what a template omits without an error: tools, their calls, or their results."""
    # Some templates render only one form of the probes: a feature is omitted only if no form renders it.
    return frozenset.intersection(*(_probe(tokenizer, *probe) for probe in _PROBES))


def _probe(tokenizer: PreTrainedTokenizerBase, tool: dict[str, Any], call: dict[str, Any]) -> frozenset[str]:
    """Return which of a tool, its call and its result a template omits without an error, for one form of the probes."""
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!"}
    call_and_result: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT_TEXT, "name": _CALL_TEXT, "tool_call_id": _ID},
    ]
    defined = try_render(tokenizer, adapt_contents(tokenizer, [question, answer]), [tool])
    called = try_render(tokenizer, adapt_contents(tokenizer, [question, *call_and_result, answer]), [tool])
    # A conversation that the template refuses (None) omits nothing without an error.
    probes = ((_TOOLS, _TOOL_TEXT, defined), (_CALLS, _CALL_TEXT, called), (_RESULTS, _RESULT_TEXT, called))
    return frozenset(
        feature for feature, text, rendered in probes if rendered is not None and text not in rendered
    )
