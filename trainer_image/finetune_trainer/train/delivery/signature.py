"""The signature of the served model, inferred from examples of its evaluation data.

The inputs have names, and the settings of transformers' GenerationConfig are parameters: `scoring` answers such requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import chat_messages
from finetune_trainer.train.data.read import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, Schema

    from finetune_crds.data import Columns, Splits
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data.split_columns import Rows

CHAT = "llm/v1/chat"
"""MLflow's name for models that take a conversation and return its next message, as endpoints of Databricks serve them."""
MESSAGES = "messages"
"""The name of the input of a chat model."""
PROMPT = "prompt"
"""The name of the input of a model that takes prompts, if the prompt is not a column of the data."""
RESPONSE, REWARD = "response", "reward"
"""The names of the answer in requests to a reward model, and of its output."""
MAX_NEW_TOKENS = 256
"""The most tokens of an answer, unless a request sets another limit. Source: transformers, TextGenerationPipeline."""
# Settings of transformers' GenerationConfig and their types in MLflow.
_SETTINGS = {
    "max_new_tokens": "long",
    "min_new_tokens": "long",
    "do_sample": "boolean",
    "temperature": "double",
    "top_p": "double",
    "top_k": "long",
    "min_p": "double",
    "repetition_penalty": "double",
    "no_repeat_ngram_size": "long",
    "num_beams": "long",
    "length_penalty": "double",
}
_MAX_EXAMPLES = 16
# Fields of messages that only training uses; clients do not send them.
_TRAINING_FIELDS = (chat_messages.WEIGHT, *chat_messages.REASONING)

_Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Example requests to the served model, and their answers in the data.

    chat: whether requests are conversations, which the model's chat template renders.
    requests: each is a prompt, or {"messages": [{role, content}, ...]}.
    answers: the text of the answer to each request.
    prompt: the name of the prompt in requests.
    """

    chat: bool = False
    requests: list[Any] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    prompt: str = PROMPT

    @property
    def input(self) -> str:
        """The name of the prompt or the conversation in requests."""
        return MESSAGES if self.chat else self.prompt


def name_prompt(recipe: Recipe, columns: Columns) -> str:
    """Return the name of the prompt in requests: its column in the data of the job, or `prompt` if there is no such column.

    A preparation may rename columns: then the name is that of the column in the source, unless a template renders the prompt from
    several columns.

    Args:
        recipe: the recipe.
        columns: the columns of an example in the splits.
    """
    data = recipe.data
    source_columns = data.columns or columns
    if data.prepare is not None:
        if data.prepare.prompt_template is not None:
            return PROMPT
        if recipe.prepared is not None and recipe.prepared.columns is not None:
            source_columns = recipe.prepared.columns
    return source_columns.prompt or PROMPT


def read_examples(splits: Splits, columns: Columns, prompt: str = PROMPT) -> Examples:
    """Read the first examples of the validation split, or of the training split if there is no validation split.

    Args:
        splits: the splits, at the version that is trained on.
        columns: the columns of an example.
        prompt: the name of the prompt in requests.

    Raises:
        DataError: data is missing or broken.
    """
    # The example requests have only messages: MLflow's signature of a chat model has a column of tools anyway.
    read_columns = [column for column in columns.content_columns if column != columns.tools]
    training_fields = {*_TRAINING_FIELDS, columns.message_weight}
    for name in ("validation", "train"):
        # The first batch of rows is enough.
        for rows in read(splits, name, read_columns):
            pairs = list(islice(_split_rows(rows, columns), _MAX_EXAMPLES))
            chat = any(isinstance(question, list) or isinstance(answer, list) for question, answer in pairs)
            requests = [
                {"messages": _build_request_messages(question, "user", training_fields)} if chat else question
                for question, _ in pairs
            ]
            answers = [_get_answer_text(answer) for _, answer in pairs]
            return Examples(chat, requests, answers, prompt)
    return Examples(columns.messages is not None, prompt=prompt)


def _split_rows(rows: Rows, columns: Columns) -> Iterator[tuple[str | _Messages, str | _Messages]]:
    """Yield the prompt and the answer of each row, as text or messages. A plain text is both."""
    if columns.messages is not None:
        for messages in map(chat_messages.rename, rows[columns.messages]):
            is_answered = bool(messages) and messages[-1]["role"] == "assistant"
            answer_messages = messages[-1:] if is_answered else []
            yield messages[: len(messages) - len(answer_messages)], answer_messages
    elif columns.text is not None:
        yield from ((text, text) for text in rows[columns.text])
    else:
        answer = columns.response or columns.chosen or columns.completion
        assert columns.prompt is not None  # noqa: S101 - the recipe was refused otherwise
        assert answer is not None  # noqa: S101
        yield from zip(rows[columns.prompt], rows[answer], strict=True)


def _build_request_messages(
    prompt: str | _Messages, role: str, training_fields: set[str | None]
) -> _Messages:
    """Return messages as clients send them."""
    if isinstance(prompt, str):
        return [{"role": role, "content": prompt}]
    return [
        _serialize_arguments(message)
        for message in chat_messages.without(
            chat_messages.messages(chat_messages.rename(prompt)), *training_fields
        )
    ]


def _serialize_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text, as clients send them; chat templates take objects."""
    calls = message.get("tool_calls")
    return message | {"tool_calls": [_serialize_call(call) for call in calls]} if calls else message


def _serialize_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function.get("arguments") or {})}}


def _get_answer_text(answer: str | _Messages) -> str:
    """Return the text of an answer; empty for one that calls tools."""
    if isinstance(answer, str):
        return answer
    return str(chat_messages.messages(chat_messages.rename(answer))[-1]["content"]) if answer else ""


def name_response(examples: Examples) -> str:
    """Return the name of the answer in requests to a reward model."""
    return RESPONSE if examples.prompt != RESPONSE else f"{RESPONSE}_text"


def infer_reward_signature(examples: Examples) -> ModelSignature:
    """Return the signature of a reward model: a prompt and an answer, or a conversation, and the reward of the answer."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import Array, Object, Property

    if examples.chat:
        message = Object([Property("role", "string"), Property("content", "string")])
        inputs = Schema([ColSpec(Array(message), name=MESSAGES)])
    else:
        names = (examples.prompt, name_response(examples))
        inputs = Schema([ColSpec("string", name=name) for name in names])
    return ModelSignature(inputs=inputs, outputs=Schema([ColSpec("double", name=REWARD)]))


def infer_signature(examples: Examples) -> ModelSignature:
    """Infer the signature from examples.

    For prompts, input and output are one text column each. For conversations, the signature is that of MLflow's chat models. Besides
    the messages, it has the optional columns that clients of an endpoint send. If messages of the data do not fit this signature, for
    example because they have other fields, the type inferred from the data replaces its type for messages. The
    signatures for prompts and for conversations have the same parameters.
    """
    from mlflow import models
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA
    from mlflow.types.schema import AnyType

    if not examples.chat:
        inputs = Schema([ColSpec("string", name=examples.input)])
        return ModelSignature(inputs=inputs, outputs=Schema([ColSpec("string")]), params=_build_parameters())
    inputs = CHAT_MODEL_INPUT_SCHEMA
    if not all(_fits(request, inputs) for request in examples.requests):
        inferred = models.infer_signature(examples.requests).inputs
        # NB: from messages that differ too much, MLflow infers one column without a name.
        message_columns = (
            inferred.inputs if inferred.has_input_names() else [ColSpec(AnyType(), name=MESSAGES)]
        )
        optional_columns = [column for column in inputs.inputs if column.name != MESSAGES]
        inputs = Schema([*message_columns, *optional_columns])
    return ModelSignature(inputs=inputs, outputs=CHAT_MODEL_OUTPUT_SCHEMA, params=_build_parameters())


def _fits(request: Any, schema: Schema) -> bool:
    from mlflow.exceptions import MlflowException
    from mlflow.models import validate_schema

    try:
        validate_schema(request, schema)
    except MlflowException:
        return False
    return True


def _build_parameters() -> ParamSchema:
    """Return the parameters of a request; without them, decoding is greedy.

    NB: the settings have no defaults: MLflow would add them to each request that lacks the parameter, and override the server's settings.
    """
    from mlflow.types import ParamSchema, ParamSpec

    return ParamSchema(
        [
            *(ParamSpec(name, kind, default=None) for name, kind in _SETTINGS.items()),
            # MLflow requires a list as the default of a list; `scoring` ignores an empty list.
            ParamSpec("stop_strings", "string", [], shape=(-1,)),
        ]
    )
