"""Messages and tools of conversations, in the form that chat templates expect.

In the table of a preparation, structures are JSON text: `tool_calls` of a message, and `tools`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.encodings import TOO_DEEP, load_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

Message = dict[str, Any]

WEIGHT = "weight"
"""The field of a message that says whether it is learned, in OpenAI's format and in the table of a preparation."""
WEIGHTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Weights of messages as text, in any case."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields of a message with what the assistant thinks before it answers, as transformers passes them on to chat templates."""
TEXT_PART = "text"
"""The type of the only parts of a message's content that are learned; a content in parts may also have images and audio."""
BETWEEN_PARTS = "\n"
"""The separator between the texts of these parts. Source: vLLM, chat_utils.py, `_parse_chat_message_content_parts`."""
OTHER_PART = "\0finetune part "
"""The beginning of a content in which a preparation found a part that is not text; the part's type, a NUL and the texts follow."""
CARRIED = ("tool_calls", "tool_call_id", "name", *REASONING, WEIGHT)
"""The fields of a message, besides role and content, that the preparation keeps."""

FIELDS = {"role": "from", "content": "value"}
"""The fields that each message has: the name in OpenAI's format, and the name in ShareGPT's."""
ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}
"""Roles that have another name in OpenAI's format: ShareGPT's (source: FastChat, conversation format of Vicuna), and `function`, which
`tool` has replaced."""
INSTRUCTING = ("system", "developer")
"""Roles of the messages with instructions for the whole conversation."""
UNSPOKEN = (*INSTRUCTING, "tool")
"""Roles of messages that are neither the user's nor the assistant's; any other role is a name for the user or the assistant."""
LEGACY_CALL = "function_call"
"""The field that `tool_calls` has replaced in OpenAI's format: one call, without its wrapper."""

# The keys of a tool's definition in the order in which servers pass them on: a Parquet file or a reader of JSON may have sorted them.
_FIRST = ("type", "function", "name", "description", "parameters", "properties", "required")


def are_fields_of_messages(fields: Collection[str]) -> bool:
    """Whether structures with these fields are messages."""
    return all(ours in fields or theirs in fields for ours, theirs in FIELDS.items())


def rename(value: Any) -> Any:
    """Return messages with the fields and roles of OpenAI's format as it is today.

    A value that is not a list of messages is returned unchanged.
    """
    if not isinstance(value, list):
        return value
    return [_rename_fields(message) if isinstance(message, dict) else message for message in value]


def _rename_fields(message: Message) -> Message:
    """Return a message in OpenAI's format of today: fields, role and call renamed, a plain content as text, a single part in a list."""
    renamed = dict(message)
    for ours, theirs in FIELDS.items():
        if renamed.get(ours) is None and renamed.get(theirs) is not None:
            renamed[ours] = renamed.pop(theirs)
    content = renamed.get("content")
    if content is not None and plain_text.is_plain(content):
        renamed["content"] = plain_text.write(content)
    elif isinstance(content, dict):
        # A single part.
        renamed["content"] = [content]
    call = renamed.pop(LEGACY_CALL, None)
    if _has_name(call) and not renamed.get("tool_calls"):
        renamed["tool_calls"] = (
            wrap_call(call) if isinstance(call, str) else [{"type": "function", "function": call}]
        )
    role = renamed.get("role")
    # `wrong_shape` reports a role that is not text.
    return renamed | ({"role": ROLES[role]} if isinstance(role, str) and role in ROLES else {})


def _has_name(call: Any) -> bool:
    """Return whether a call in the field LEGACY_CALL has a name: some writers add an empty call to messages that call nothing."""
    try:
        parsed = load_json(call) if isinstance(call, str) else call
    except ValueError:
        # Invalid JSON counts as a call, so that its error is reported when the calls are parsed.
        return bool(call.strip())
    return isinstance(parsed, dict) and parsed.get("name") is not None


def wrap_call(text: str) -> str:
    """Return the JSON text of a list with the only call of a message."""
    return f'[{{"type": "function", "function": {text}}}]'


def wrong_shape(value: Any) -> str | None:
    """Return what keeps a value from being a list of {role, content}, or None."""
    if not isinstance(value, list):
        return "it is text"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"message {number} has neither a role nor a content"
        if not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        # A message that calls tools needs no content.
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            return f"message {number} has no content"
    return None


def messages(value: Sequence[Message]) -> list[Message]:
    """Return messages with contents as text and tool calls as structures, without fields that have no value.

    As in servers (vLLM), a message that only calls tools has the content "", the texts of a content's parts are joined, and
    arguments that are JSON text become the object that they describe.

    Raises:
        ValueError: a content has a part that is not text, tool calls are not a list of calls, or their arguments are not a JSON object.
    """
    return [_normalize_message(message, number) for number, message in enumerate(value, start=1)]


def tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation, given as a list or as JSON text; None if there are none.

    The well-known keys of a definition have the order that clients send: type, function, name, description, parameters.

    Raises:
        ValueError: the tools are not a list of definitions.
    """
    definitions = _parse_json(value, "tools") if isinstance(value, str) else _drop_nulls(value)
    if not definitions:
        return None
    if not isinstance(definitions, list) or not all(isinstance(tool, dict) for tool in definitions):
        raise ValueError("tools are not a list of definitions")
    return [_order_keys(tool) for tool in definitions]


def weighed(value: Sequence[Message], field: str) -> tuple[list[Message], list[bool]]:
    """Return messages without the field of their weights, and whether each has weight 1, which is the default.

    The weight of a message that is not the assistant's is ignored, and treated as 1.

    Raises:
        ValueError: the weight of an answer is neither 1 nor 0.
    """
    weights = [
        message["role"] != "assistant" or _parse_weight(message.get(field), field, number)
        for number, message in enumerate(value, start=1)
    ]
    return without(value, field), weights


def without(value: Sequence[Message], *fields: str | None) -> list[Message]:
    """Return messages without some fields."""
    return [{name: part for name, part in message.items() if name not in fields} for message in value]


def reply(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """Return the messages of an answer that follow the prompt, which the answer may repeat, with or without the system message.

    Raises:
        ValueError: the first added message has another role than the assistant's.
    """
    without_system = [message for message in prompt if message["role"] != "system"]
    repeated = next((start for start in (prompt, without_system) if answer[: len(start)] == start), [])
    added = answer[len(repeated) :]
    if added and added[0]["role"] != "assistant":
        raise ValueError(
            f"begins its answer with a message of role {added[0]['role']}: the first message after those of the prompt must have role "
            "assistant"
        )
    return added


def is_blank(message: Message) -> bool:
    """Whether a message says nothing and calls no tools."""
    return not message.get("tool_calls") and not message.get("content", "").strip()


def with_texts(text: str, change: Callable[[str], str]) -> str:
    """Return JSON text with its strings and numbers changed, except for the keys; a number that changes becomes a string.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    value = load_json(text)
    try:
        return json.dumps(_change_texts(value, change), ensure_ascii=False)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _normalize_message(message: Message, number: int) -> Message:
    """Return a message as `messages` does; `number` is its place in the conversation, from 1, for errors."""
    normalized = {name: value for name, value in message.items() if value is not None}
    calls = normalized.pop("tool_calls", None)
    normalized["content"] = _join_parts(normalized.get("content", ""), number)
    if not calls:
        return normalized
    where = f"tool_calls of message {number}"
    parsed_calls = _drop_nulls(_parse_json(calls, where) if isinstance(calls, str) else calls)
    if not isinstance(parsed_calls, list) or not all(isinstance(call, dict) for call in parsed_calls):
        raise ValueError(f"{where} are not a list of calls")
    if not parsed_calls:
        return normalized
    return normalized | {"tool_calls": [_parse_arguments(call, where) for call in parsed_calls]}


def _join_parts(content: str | list[Any], number: int) -> str:
    """Return the text of a content, which may be a list of parts: texts, or objects as clients of OpenAI send them."""
    if isinstance(content, str):
        if content.startswith(OTHER_PART):
            raise _build_part_error(number, content.removeprefix(OTHER_PART).partition("\0")[0])
        return content
    texts = []
    for part in content:
        kind = part.get("type", TEXT_PART) if isinstance(part, dict) else TEXT_PART
        text = part.get("text") if isinstance(part, dict) else part
        written = plain_text.write(text) if plain_text.is_plain(text) else None
        if kind != TEXT_PART or written is None:
            raise _build_part_error(number, kind)
        texts.append(written)
    return BETWEEN_PARTS.join(texts)


def _build_part_error(number: int, kind: Any) -> ValueError:
    if kind == TEXT_PART:
        return ValueError(f"message {number} has a text part without a text")
    return ValueError(f"message {number} has a part of type {kind}, but only text parts can be trained on")


def _parse_weight(value: Any, field: str, number: int) -> bool:
    if value is None:
        return True
    weight = WEIGHTS.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(weight, int | float) and weight in (0, 1):
        return bool(weight)
    raise ValueError(
        f"{field} of message {number} is {value!r:.40}, but must be 1 (the message is learned) or 0 (it is not)"
    )


def _parse_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call whose arguments are an object, in the field `function` or in the call itself."""
    function = call.get("function")
    if isinstance(function, dict):
        return call | {"function": _parse_arguments(function, where)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        parsed_arguments = _parse_json(arguments, f"arguments in {where}") if arguments.strip() else {}
        if isinstance(parsed_arguments, dict):
            return call | {"arguments": parsed_arguments}
        raise ValueError(f"arguments in {where} are not a JSON object")
    return call


def _parse_json(text: str, what: str) -> Any:
    try:
        return load_json(text) if text.strip() else None
    except ValueError as error:
        raise ValueError(f"{what} are not JSON") from error


def _drop_nulls(value: Any) -> Any:
    """Return a structure without keys whose value is None.

    In a column of structures, each row has the keys of all rows, with None for the missing ones.

    Raises:
        ValueError: the structure is nested too deeply.
    """
    try:
        return _drop_nested_nulls(value)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _drop_nested_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nested_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nested_nulls(item) for item in value] if isinstance(value, list) else value


def _order_keys(tool: dict[str, Any]) -> dict[str, Any]:
    ordered = {key: tool[key] for key in _sort_known_first(tool)}
    for key in ("function", "parameters"):
        if isinstance(ordered.get(key), dict):
            ordered[key] = _order_keys(ordered[key])
    return ordered


def _sort_known_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST))


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON whose strings and numbers, except for the keys, are changed."""
    if isinstance(value, dict):
        return {key: _change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_change_texts(item, change) for item in value]
    if isinstance(value, str):
        return _change_text(value, change)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    text = json.dumps(value)
    return value if (changed := change(text)) == text else changed


def _change_text(value: str, change: Callable[[str], str]) -> str:
    """Change a string, or the texts in its JSON: in OpenAI's format, the arguments of a call are JSON in a string."""
    if not value.lstrip().startswith("{"):
        return change(value)
    try:
        return with_texts(value, change)
    except ValueError:
        return change(value)
