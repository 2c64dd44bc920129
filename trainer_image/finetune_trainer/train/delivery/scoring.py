"""The code with which MLflow serves a registered model: each version has a copy of this file (MLflow's models from code).

It needs only the packages of the version's requirements, nothing from the job's image. It loads the files of the version with transformers and
peft, and answers as the evaluation of the job does: a greedy answer has the same tokens. MLflow's own code for transformers pipelines
repeats the prompt in its answers, tokenizes the beginning of a rendered conversation twice, and accepts no columns.

The settings in MLmodel, which `model_config` or MLFLOW_PYFUNC_INFERENCE_CONFIG may replace:

input: the column with the prompts or the conversations.
chat: whether the column has conversations.
base: where the base of an adapter is: a folder, an address that MLflow downloads, or a Hub id. None: the weights are in the version.
revision: the commit of a base on the Hub.
adapter: whether the adapter of the version is put on the base.
trust_remote_code: whether the model's own code may run, as with model.trustRemoteCode of the job.
max_new_tokens: the most tokens of an answer, unless a request sets it.
name: the model's name in chat completions.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

_MODEL, _ADAPTER, _TOKENIZER = "model", "peft", "components/tokenizer"
_PROBE = "probed content"
# Settings that have no effect unless tokens are sampled.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# Settings of a chat client, and their names in transformers.
_RENAMED = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
# Settings of a chat client that are refused, except with these values, which change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "custom_inputs": ({},),
}


class FineTunedModel(PythonModel):
    """A language model that continues prompts or answers conversations."""

    def load_context(self, context: Any) -> None:
        """Load the tokenizer, the weights and the generation config, onto the GPUs if there are any."""
        settings = context.model_config
        root = Path(__file__).parent
        trust = {"trust_remote_code": bool(settings["trust_remote_code"])}
        self._input, self._is_chat, self._name = settings["input"], settings["chat"], settings["name"]
        self._max_new_tokens = int(settings["max_new_tokens"])
        self._tokenizer = AutoTokenizer.from_pretrained(str(root / _TOKENIZER), **trust)
        self._takes_parts = self._is_chat and _takes_parts(self._tokenizer)
        base, revision = _locate_base(root, settings)
        model = AutoModelForCausalLM.from_pretrained(
            base,
            revision=revision,
            dtype="auto",
            device_map="auto" if torch.cuda.is_available() else None,
            **trust,
        )
        self._defaults = model.generation_config
        # NB: generate() would take unset parameters from the model's config, for example a repetition penalty that is meant for sampling.
        model.generation_config = GenerationConfig()
        config = model.config.get_text_config()
        self._context_tokens = getattr(config, "max_position_embeddings", None)
        if settings["adapter"]:
            # NB: the adapter may have been trained for other stop tokens than its base.
            self._defaults = GenerationConfig.from_pretrained(str(root / _ADAPTER))
            model = _load_adapter(model, root / _ADAPTER)
            adapter = model.peft_config["default"]
            if adapter.is_prompt_learning and self._context_tokens is not None:
                self._context_tokens -= adapter.num_virtual_tokens
        self._model = model.eval()
        stops = self._defaults.eos_token_id
        configured_stops = stops if isinstance(stops, list) else [stops]
        all_stops = (*configured_stops, self._tokenizer.eos_token_id)
        self._stops = sorted({int(token) for token in all_stops if token is not None})

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> list[Any]:
        """Answer each row of a request on its own, so that no answer depends on another row.

        Args:
            model_input: rows with the column of prompts, or with messages and the settings of a chat client.
            params: settings of transformers' GenerationConfig. do_sample decides whether tokens are sampled; without it, they are sampled
                if one of temperature, top_p, top_k and min_p is set and the temperature is not 0. Otherwise decoding is greedy.

        Returns:
            For prompts the texts of the answers; for conversations chat completions in OpenAI's format.

        Raises:
            MlflowException: a row has no prompt, its prompt leaves no room for an answer, or a setting is not supported.
        """
        return [self._answer(row, params or {}) for row in self._list_rows(model_input)]

    def _list_rows(self, model_input: Any) -> list[dict[str, Any]]:
        """Return the rows of a request without unset values. If the version has no signature, the request need not be a DataFrame."""
        if isinstance(model_input, pd.DataFrame):
            rows = model_input.to_dict(orient="records")
        elif isinstance(model_input, dict):
            rows = [model_input]
        else:
            # One prompt, or a list of prompts or of rows.
            values = [model_input] if isinstance(model_input, str) else model_input
            rows = [value if isinstance(value, dict) else {self._input: value} for value in values]
        if len(rows) == 1 and not self._is_chat:
            # NB: of a dictionary with a list of prompts, MLflow makes a DataFrame with one row.
            prompts = _to_plain(rows[0].get(self._input))
            rows = [{self._input: prompt} for prompt in prompts] if isinstance(prompts, list) else rows
        return [
            {name: _to_plain(value) for name, value in row.items() if not _is_unset(value)} for row in rows
        ]

    def _answer(self, row: dict[str, Any], params: dict[str, Any]) -> Any:
        value = row.pop(self._input, None)
        settings = _merge_settings(params, row if self._is_chat else {})
        if self._is_chat:
            prompt = self._encode_conversation(value, settings.pop("tools", None))
        else:
            prompt = self._encode_text(value)
        answer, is_cut = self._generate(prompt, settings)
        end = next((at for at, token in enumerate(answer) if token in self._stops), len(answer))
        text = self._decode(answer[:end], settings.get("stop_strings", []))
        if not self._is_chat:
            return text
        return _describe_completion(
            self._name,
            text,
            prompt_tokens=len(prompt),
            answer_tokens=len(answer),
            finish_reason="length" if is_cut else "stop",
        )

    def _encode_text(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise MlflowException.invalid_parameter_value(f"a row has no text in the column {self._input}")
        tokens = list(self._tokenizer(text).input_ids)
        # NB: a tokenizer may append the end of text.
        if tokens and tokens[-1] == self._tokenizer.eos_token_id:
            tokens.pop()
        return tokens or [self._beginning]

    @property
    def _beginning(self) -> int:
        """The token that is used as the prompt if the prompt is empty."""
        tokenizer = self._tokenizer
        return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)

    def _encode_conversation(self, messages: Any, tools: Any) -> list[int]:
        if not messages:
            raise MlflowException.invalid_parameter_value("a row has no messages")
        prepared = [
            _prepare_message(message, number, as_parts=self._takes_parts)
            for number, message in enumerate(messages, start=1)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                prepared,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:
            # A template is a program: it can raise anything.
            raise MlflowException.invalid_parameter_value(
                f"the chat template does not take the messages: {error}"
            ) from error
        # NB: the template writes the special tokens itself.
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _generate(self, prompt: list[int], settings: dict[str, Any]) -> tuple[list[int], bool]:
        """Generate the tokens of an answer, including its stop token; returns whether the length limit cut it."""
        max_new_tokens = int(settings.get("max_new_tokens", self._max_new_tokens))
        if self._context_tokens is not None:
            max_new_tokens = min(max_new_tokens, self._context_tokens - len(prompt))
        if max_new_tokens <= 0:
            raise MlflowException.invalid_parameter_value(
                f"the prompt has {len(prompt)} tokens, and the model takes {self._context_tokens} including the answer: shorten the prompt"
            )
        padding = self._tokenizer.pad_token_id
        is_sampled = _is_sampled(settings)
        # The model's generation config is meant for sampling.
        defaults = self._defaults.to_diff_dict() if is_sampled else {}
        config = GenerationConfig.from_dict(
            {
                **defaults,
                **{name: value for name, value in settings.items() if is_sampled or name not in _SAMPLING},
                "do_sample": is_sampled,
                "max_new_tokens": max_new_tokens,
                "max_length": None,
                "eos_token_id": self._stops,
                "pad_token_id": self._stops[0] if padding is None else padding,
            }
        )
        ids = torch.tensor([prompt], device=self._model.device)
        try:
            with torch.inference_mode():
                tokens = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    tokenizer=self._tokenizer,
                )
        except ValueError as error:
            raise MlflowException.invalid_parameter_value(
                f"the settings of the request conflict: {error}"
            ) from error
        answer: list[int] = tokens[0, len(prompt) :].tolist()
        return answer, len(answer) == max_new_tokens and answer[-1] not in self._stops

    def _decode(self, tokens: list[int], stop_strings: list[str]) -> str:
        # NB: a tokenizer may be set to remove spaces before punctuation.
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for stop in stop_strings:
            text = text.partition(stop)[0]
        return str(text).strip()


def _locate_base(root: Path, settings: dict[str, Any]) -> tuple[str, str | None]:
    """Return the folder of the weights, or their Hub id and the commit there."""
    base = settings["base"]
    if base is None:
        return str(root / _MODEL), None
    if base.startswith("/"):
        return base, None
    if ":/" in base:
        return mlflow.artifacts.download_artifacts(artifact_uri=base), None
    return base, settings["revision"]


def _load_adapter(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter))


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124 - pandas' NaN


def _to_plain(value: Any) -> Any:
    """Return a value without numpy's types, and without unset fields of structures."""
    if hasattr(value, "tolist"):
        return _to_plain(value.tolist())
    if isinstance(value, dict):
        return {name: _to_plain(part) for name, part in value.items() if not _is_unset(part)}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    return value


def _merge_settings(params: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a request by their names in transformers; columns of a chat client override params."""
    for name, neutral in _NEUTRAL.items():
        if name not in row:
            continue
        value = row.pop(name)
        if value not in neutral:
            raise MlflowException.invalid_parameter_value(
                f"{name} is not supported: remove it from the request"
            )
    renamed = {_RENAMED.get(name, name): value for name, value in row.items()}
    settings = {**params, **renamed}
    # NB: every request has all parameters: an unset parameter is None, or an empty list.
    return {name: value for name, value in settings.items() if value is not None and value != []}


def _is_sampled(settings: dict[str, Any]) -> bool:
    chosen = settings.get("do_sample")
    if chosen is not None:
        return bool(chosen)
    return settings.get("temperature") != 0 and any(name in settings for name in _SAMPLING)


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the chat template renders only contents that are lists of parts, and omits text."""
    rendered_text = _render_content(tokenizer, _PROBE)
    rendered_parts = _render_content(tokenizer, _split_into_parts(_PROBE))
    return _PROBE not in rendered_text and _PROBE in rendered_parts


def _render_content(tokenizer: Any, content: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program: it can raise anything
        return ""


def _split_into_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _prepare_message(message: Any, number: int, *, as_parts: bool) -> dict[str, Any]:
    """Return a message as in training: with content that the template supports, and arguments of calls as objects."""
    if not isinstance(message, dict):
        raise MlflowException.invalid_parameter_value(
            f"message {number} is not an object with a role and a content"
        )
    text = _join_parts(message.get("content", ""), number)
    prepared = {name: value for name, value in message.items() if name != "tool_calls"}
    prepared["content"] = _split_into_parts(text) if as_parts else text
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = _parse_calls(calls, f"tool_calls of message {number}")
    return prepared


def _join_parts(content: Any, number: int) -> str:
    """Return the text of a content, which may be a list of parts: texts, or objects as clients of OpenAI send them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MlflowException.invalid_parameter_value(f"the content of message {number} is not text")
    return "\n".join(_read_part(part, number) for part in content)


def _read_part(part: Any, number: int) -> str:
    kind, text = "text", part
    if isinstance(part, dict):
        kind, text = part.get("type", "text"), part.get("text")
    if kind != "text":
        raise MlflowException.invalid_parameter_value(
            f"message {number} has a part of type {kind}, and the model takes only text"
        )
    if not isinstance(text, str):
        raise MlflowException.invalid_parameter_value(f"message {number} has a text part without a text")
    return text


def _parse_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise MlflowException.invalid_parameter_value(f"{field} are not a list of calls")
    return [_parse_arguments(call, field) for call in calls]


def _parse_arguments(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a call with its arguments as an object; they are in its `function`, or in the call itself.

    Some clients send a blank text for a call without arguments.
    """
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _parse_arguments(function, field)}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise MlflowException.invalid_parameter_value(f"arguments in {field} are not JSON") from error
    if not isinstance(arguments, dict):
        raise MlflowException.invalid_parameter_value(f"arguments in {field} are not a JSON object")
    return {**call, "arguments": arguments}


def _describe_completion(
    name: str, text: str, *, prompt_tokens: int, answer_tokens: int, finish_reason: str
) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        },
    }


set_model(FineTunedModel())
