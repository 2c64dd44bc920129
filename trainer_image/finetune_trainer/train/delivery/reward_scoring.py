"""The code with which MLflow serves a registered reward model: each version has a copy of this file (MLflow's models from code).

It needs only the packages of the version's requirements, nothing from the job's image, and shares no code with `scoring`, which serves language
models. It loads the files of the version with transformers and peft, and encodes documents as the training of the job did.

The settings in MLmodel, which `model_config` or MLFLOW_PYFUNC_INFERENCE_CONFIG may replace:

prompt: the column with the prompts.
response: the column with the answers.
chat: whether rows have conversations in the column `messages`, instead of a prompt and an answer.
base: where the base of an adapter is: a folder, an address that MLflow downloads, or a Hub id. None: the weights are in the version.
revision: the commit of a base on the Hub.
adapter: whether the adapter of the version is put on the base.
trust_remote_code: whether the model's own code may run, as with model.trustRemoteCode of the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

_MODEL, _ADAPTER, _TOKENIZER = "model", "peft", "components/tokenizer"
_MESSAGES = "messages"
_PROBE = "probed content"


class ServedRewardModel(PythonModel):
    """A model that computes the reward of an answer."""

    def load_context(self, context: Any) -> None:
        """Load the tokenizer and the weights, onto the GPUs if there are any."""
        settings = context.model_config
        root = Path(__file__).parent
        trust = {"trust_remote_code": bool(settings["trust_remote_code"])}
        self._prompt, self._response = settings["prompt"], settings["response"]
        self._is_chat = settings["chat"]
        self._tokenizer = AutoTokenizer.from_pretrained(str(root / _TOKENIZER), **trust)
        self._takes_parts = self._is_chat and _takes_parts(self._tokenizer)
        base, revision = _locate_base(root, settings)
        model = AutoModelForSequenceClassification.from_pretrained(
            base,
            revision=revision,
            dtype="auto",
            device_map="auto" if torch.cuda.is_available() else None,
            # The base of an adapter may be a language model, whose config does not say how many outputs the score head has.
            num_labels=1,
            **trust,
        )
        # The last token before the padding has the reward. NB: a document may end with the padding token itself.
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        if settings["adapter"]:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(root / _ADAPTER))
        self._model = model.eval()

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return the reward of each row, in the column `reward`. Each row is scored on its own, so that no reward depends on another row.

        Args:
            model_input: rows with a prompt and an answer, or with a conversation whose last message is the answer.
            params: not used.

        Raises:
            MlflowException: a row lacks a column, or the chat template does not take its messages.
        """
        del params
        rows = pd.DataFrame(model_input).to_dict(orient="records")
        encode = self._encode_conversation if self._is_chat else self._encode_texts
        return pd.DataFrame({"reward": [self._score(encode(row)) for row in rows]}, dtype="float64")

    def _score(self, tokens: list[int]) -> float:
        ids = torch.tensor([tokens], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return float(logits[0, 0])

    def _encode_texts(self, row: dict[str, Any]) -> list[int]:
        prompt, response = (_get_text(row, column) for column in (self._prompt, self._response))
        end = self._tokenizer.eos_token_id
        tokens = list(self._tokenizer(prompt).input_ids)
        # NB: a tokenizer may append the end of text.
        if tokens and tokens[-1] == end:
            tokens.pop()
        return [*tokens, *self._tokenizer(response, add_special_tokens=False).input_ids, end]

    def _encode_conversation(self, row: dict[str, Any]) -> list[int]:
        messages: Any = row.get(_MESSAGES)
        if hasattr(messages, "tolist"):
            messages = messages.tolist()
        if not isinstance(messages, list) or not messages:
            raise MlflowException.invalid_parameter_value("a row has no messages")
        prepared = [_prepare_message(message, as_parts=self._takes_parts) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(prepared, tokenize=False)
        except Exception as error:
            # A template is a program: it can raise anything.
            raise MlflowException.invalid_parameter_value(
                f"the chat template does not take the messages: {error}"
            ) from error
        # NB: the template writes the special tokens itself.
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


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


def _get_text(row: dict[str, Any], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise MlflowException.invalid_parameter_value(f"a row has no text in the column {column}")
    return text


def _prepare_message(message: Any, *, as_parts: bool) -> dict[str, Any]:
    """Return a message with content that the template supports."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        raise MlflowException.invalid_parameter_value(
            "a message is not an object with a role and a content of text"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    return fields | {"content": [{"type": "text", "text": content}] if as_parts else content}


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the chat template renders only contents that are lists of parts, and omits text."""
    contents = (_PROBE, [{"type": "text", "text": _PROBE}])
    rendered_text, rendered_parts = (_render_content(tokenizer, content) for content in contents)
    return _PROBE not in rendered_text and _PROBE in rendered_parts


def _render_content(tokenizer: Any, content: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program: it can raise anything
        return ""


set_model(ServedRewardModel())
