"""Renders conversations with the model's chat template, in Spark's Python workers.

NB: of a worker's exception only the text reaches the driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune_trainer import chat_templates
from finetune_trainer.outcome import DataError, RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

_MARK = "the chat template of the model fails on "


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text.

    Raises:
        ValueError: the template does not take it; `failure` finds the sentence in what Spark says of it.
    """
    try:
        return str(tokenizer.apply_chat_template([*turns], tokenize=False))
    except chat_templates.FAILURES as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise ValueError(f"{_MARK}a conversation of the roles {roles}: {error}") from error


def check(tokenizer: PreTrainedTokenizerBase, base: str) -> None:
    """Check that a tokenizer has a chat template.

    Raises:
        RecipeRefusedError: it has none.
    """
    if tokenizer.chat_template is None:
        raise RecipeRefusedError(
            f"conversations need a chat template, and the tokenizer of {base} has none: set model.chatTemplate"
        )


def failure(said: str) -> DataError | None:
    """Return the error of a conversation that the template did not take, from the text of Spark's exception."""
    found = re.search(f"ValueError: ({re.escape(_MARK)}.*)", said)
    if found is None:
        return None
    return DataError(
        "TemplateFailed", f"{found.group(1).rstrip('.')}; drop such rows with data.prepare.unrenderable: Drop"
    )
