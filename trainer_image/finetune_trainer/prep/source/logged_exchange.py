"""Reads the JSON texts of a logged request and of its response: the conversation, and the answer to it.

Requests and responses have one of these shapes:

- chat: {"messages": [...]}, and {"choices": [{"message": {...}}]}
- completion: {"prompt": "..."}, and {"choices": [{"text": "..."}]}
- of an MLflow model: either of these requests, or a prompt under another name, in `inputs`, `instances`, `dataframe_records` or
  `dataframe_split`; and a text in {"predictions": [...]}

A streamed response is a list of chunks: as a JSON list, one in each line, or as server-sent events.

Sources: developers.openai.com/api/reference (chat completions, completions and their chunks); mlflow.org/docs, "Local serving
specification" of the scoring server; html.spec.whatwg.org, "Server-sent events".
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from finetune_trainer.examples import chat_messages
from finetune_trainer.examples.encodings import parse_json

Reason = Literal["unreadable", "unknownShape", "severalAnswers", "toolCalls", "notText"]
"""Why an exchange is not an example. unreadable: not JSON. unknownShape: neither chat nor completion. severalAnswers: several prompts,
or several answers. toolCalls: the request offers tools, or a message calls one. notText: a content has parts that are not text."""

Json = dict[str, Any]

# The key of the rows of an MLflow request, other than `dataframe_split`.
_ROWS = ("inputs", "instances", "dataframe_records")
# The reasons why an answer ends before its end. Source: OpenAI, `finish_reason`.
_CUT_OFF = ("length", "content_filter")
_END_OF_STREAM = "[DONE]"
# The prefix of an event's text, and the prefixes of its other lines; a comment begins with a colon.
_EVENT, _NO_EVENT = "data:", (":", "event:", "id:", "retry:")


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str


class Exchange(NamedTuple):
    """A conversation, and the answer to it.

    is_finished: whether the answer ends where the model ended it. False if a limit of tokens or a filter cut it off, or if its
        stream has no end.
    """

    prompt: list[Message]
    answer: str
    is_finished: bool


class UnusableError(Exception):
    """An exchange that is not an example."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


def parse_exchange(request: str, response: str) -> Exchange:
    """Return the exchange of a request and its response.

    Raises:
        UnusableError: a text is not JSON, or is not an exchange of texts with one answer.
    """
    prompt = _read_prompt(_load(request))
    chunks = _load_response(response)
    answer, is_finished = _read_answer(chunks) if isinstance(chunks, list) else _read_whole_answer(chunks)
    return Exchange(prompt, answer, is_finished)


def _load(text: str) -> Any:
    try:
        return parse_json(text.encode())
    except ValueError as error:
        raise UnusableError("unreadable") from error


def _load_response(text: str) -> Any:
    """Return the value of a response; a list for a streamed response."""
    try:
        return _load(text)
    except UnusableError:
        # NB: not `splitlines`, which also splits inside JSON strings, at U+2028.
        lines = [line.strip() for line in text.split("\n")]
        chunks = [line.removeprefix(_EVENT).strip() for line in lines if not line.startswith(_NO_EVENT)]
        values = [_load(chunk) for chunk in chunks if chunk not in ("", _END_OF_STREAM)]
        if not values:
            raise
        return values


def _read_prompt(request: Any) -> list[Message]:
    row, is_wrapped = _unwrap(request)
    if isinstance(row, str) and is_wrapped:
        return [Message("user", row)]
    if not isinstance(row, dict):
        raise UnusableError("unknownShape")
    if row.get("tools") or row.get("functions"):
        raise UnusableError("toolCalls")
    if "messages" in row:
        return _read_messages(row["messages"])
    prompt = row.get("prompt")
    if prompt is None and is_wrapped and len(row) == 1:
        # The input of a model that is named after the column of its training data.
        (prompt,) = row.values()
    return [Message("user", _read_text(_get_only(prompt)))]


def _unwrap(request: Any) -> tuple[Any, bool]:
    """Return the row of a request to an MLflow model and true, or another request and false."""
    if not isinstance(request, dict):
        return request, False
    split = request.get("dataframe_split")
    if isinstance(split, dict):
        columns, row = split.get("columns"), _get_only(split.get("data"))
        if isinstance(columns, list) and isinstance(row, list) and len(columns) == len(row):
            return {str(name): value for name, value in zip(columns, row, strict=True)}, True
        raise UnusableError("unknownShape")
    for key in _ROWS:
        if key in request:
            return _get_only(request[key]), True
    return request, False


def _get_only(value: Any) -> Any:
    """Return the only item of a list, or a value that is not a list."""
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        raise UnusableError("severalAnswers")
    return value[0] if value else None


def _read_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UnusableError("unknownShape")
    messages = [_read_message(message) for message in chat_messages.rename(value)]
    if messages[-1].role == "assistant":
        # The response continues this message, so it is not an answer.
        raise UnusableError("unknownShape")
    return messages


def _read_message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnusableError("unknownShape")
    if message["role"] == "tool" or message.get("tool_calls"):
        raise UnusableError("toolCalls")
    return Message(message["role"], _read_text(message.get("content")))


def _read_text(content: Any) -> str:
    """Return a content as text; the texts of its parts are joined as a preparation joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableError("unknownShape")
    return chat_messages.BETWEEN_PARTS.join(map(_read_part, content))


def _read_part(part: Any) -> str:
    text = part
    if isinstance(part, dict) and part.get("type") == chat_messages.TEXT_PART:
        text = part.get("text")
    if not isinstance(text, str):
        raise UnusableError("notText")
    return text


def _read_whole_answer(response: Any) -> tuple[str, bool]:
    """Return the answer of a response that was not streamed, and whether it is finished."""
    if isinstance(response, dict) and "predictions" in response:
        response = _get_only(response["predictions"])
        if isinstance(response, str):
            return response, True
    choice = _read_choice(response)
    if choice is None:
        raise UnusableError("unknownShape")
    return _read_choice_text(choice), choice.get("finish_reason") not in _CUT_OFF


def _read_answer(chunks: list[Any]) -> tuple[str, bool]:
    """Return the answer of a streamed response, and whether it is finished."""
    choices = [choice for chunk in chunks if (choice := _read_choice(chunk)) is not None]
    if not choices:
        raise UnusableError("unknownShape")
    ends = [end for choice in choices if (end := choice.get("finish_reason")) is not None]
    text = "".join(_read_choice_text(choice) for choice in choices)
    return text, bool(ends) and not any(end in _CUT_OFF for end in ends)


def _read_choice(response: Any) -> Json | None:
    """Return the only choice of a response or of a chunk; None for a chunk without one, which has the usage of tokens."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list):
        raise UnusableError("unknownShape")
    choice = _get_only(choices)
    if choice is None:
        return None
    if not isinstance(choice, dict):
        raise UnusableError("unknownShape")
    if choice.get("index"):
        raise UnusableError("severalAnswers")
    return choice


def _read_choice_text(choice: Json) -> str:
    """Return the text of a choice, empty if it has none."""
    for key in ("message", "delta"):
        if isinstance(choice.get(key), dict):
            (message,) = chat_messages.rename([choice[key]])
            if message.get("tool_calls"):
                raise UnusableError("toolCalls")
            content = message.get("content")
            return "" if content is None else _read_text(content)
    return _read_text(choice.get("text"))
