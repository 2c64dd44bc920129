"""Renders conversations with the model's chat template, in Spark's Python workers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune_trainer.outcome import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

# NB: of a worker's exception only the text reaches the driver.
_MARK = "the chat template of the model fails on "


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text.

    Raises:
        ValueError: the template does not take it; `failure` finds the sentence in what Spark says of it.
    """
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template([*turns], tokenize=False))
    except TemplateError as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise ValueError(f"{_MARK}a conversation of the roles {roles}: {error}") from error


def failure(said: str) -> DataError | None:
    """Return the error of a conversation that the template did not take, from the text of Spark's exception."""
    found = re.search(f"ValueError: ({re.escape(_MARK)}.*)", said)
    if found is None:
        return None
    return DataError(
        "TemplateFailed", f"{found.group(1).rstrip('.')}; leave such rows out with data.prepare.filter"
    )
