"""What the served model takes and returns: its signature, inferred from examples of the data that it is evaluated on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune_trainer import turns
from finetune_trainer.train.data.read import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow.models import ModelSignature

    from finetune_crds.data import Columns, Splits
    from finetune_trainer.train.data.read import Rows

CHAT = "llm/v1/chat"
"""MLflow's name for models that take a conversation and return its next message, as endpoints of Databricks serve them."""
_EXAMPLES = 16
# Fields of messages that training has, and clients do not send.
_UNSENT = (turns.WEIGHT, *turns.REASONING)

_Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Requests to the served model, and the answers that the data have.

    chat: whether requests are conversations, which the model's chat template renders.
    requests: prompts, or {"messages": [{role, content}, ...]} each.
    answers: the text of the answer to each.
    """

    chat: bool = False
    requests: list[Any] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


def examples(splits: Splits, columns: Columns) -> Examples:
    """Read the first examples of the validation split, or of the training split where there is no other.

    Args:
        splits: the splits, at the version that is trained on.
        columns: those of an example.

    Raises:
        DataError: data is missing or broken.
    """
    for name in ("validation", "train"):
        for rows in read(splits, name, [column for column in columns.said if column != columns.tools]):
            found = list(islice(_pairs(rows, columns), _EXAMPLES))
            chat = any(isinstance(part, list) for pair in found for part in pair)
            unsent = {*_UNSENT, columns.message_weight}
            requests = [
                {"messages": _turns(prompt, "user", unsent)} if chat else prompt for prompt, _ in found
            ]
            return Examples(chat, requests, [_text(answer) for _, answer in found])
    return Examples(columns.messages is not None)


def _pairs(rows: Rows, columns: Columns) -> Iterator[tuple[str | _Turns, str | _Turns]]:
    """What a model is asked and what it answers, text or messages each. A text is its own continuation."""
    if columns.messages is not None:
        for said in map(turns.rename, rows[columns.messages]):
            answered = bool(said) and said[-1]["role"] == "assistant"
            yield (said[:-1], said[-1:]) if answered else (said, [])
    elif columns.text is not None:
        yield from ((text, text) for text in rows[columns.text])
    else:
        answer = columns.response or columns.chosen or columns.completion
        assert columns.prompt is not None  # noqa: S101 - the recipe was refused otherwise
        assert answer is not None  # noqa: S101
        yield from zip(rows[columns.prompt], rows[answer], strict=True)


def _turns(said: str | _Turns, role: str, unsent: set[str | None]) -> _Turns:
    """Messages as clients send them."""
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    return [_sent(message) for message in turns.without(turns.messages(turns.rename(said)), *unsent)]


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text, which chat templates take as objects."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_sent_call(call) for call in calls]} if calls else message


def _sent_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function.get("arguments") or {})}}


def _text(answer: str | _Turns) -> str:
    """The text of an answer; empty for one that calls tools."""
    if isinstance(answer, str):
        return answer
    return str(turns.messages(turns.rename(answer))[-1]["content"]) if answer else ""


def infer(found: Examples) -> ModelSignature:
    """Infer the signature from examples.

    Prompts give text to text. Conversations give MLflow's signature of a chat model, whose optional parameters clients of an
    endpoint send. Where the messages of the data do not fit into it, such as those with fields of their own, their
    own type takes the place of that column.
    """
    import pandas as pd
    from mlflow.exceptions import MlflowException
    from mlflow.models import ModelSignature, infer_signature, validate_schema
    from mlflow.types import ColSpec, Schema
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA
    from mlflow.types.schema import AnyType

    if not found.chat:
        # NB: of plain lists, MLflow asks whether they are frames of Spark, and Spark ends a process that runs `python -c`.
        return infer_signature(*(pd.Series(texts, dtype=object) for texts in (found.requests, found.answers)))
    inputs = CHAT_MODEL_INPUT_SCHEMA
    for request in found.requests:
        try:
            validate_schema(request, inputs)
        except MlflowException:
            inferred = infer_signature(found.requests).inputs
            # NB: of messages that differ too much, MLflow infers one column without a name.
            own = inferred.inputs if inferred.has_input_names() else [ColSpec(AnyType(), name="messages")]
            inputs = Schema([*own, *(column for column in inputs.inputs if column.name != "messages")])
            break
    return ModelSignature(inputs=inputs, outputs=CHAT_MODEL_OUTPUT_SCHEMA)
