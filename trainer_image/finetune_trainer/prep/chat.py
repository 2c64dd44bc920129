"""Renders conversations with the model's chat template, in Spark's Python workers.

NB: of a worker's exception only the text reaches the driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune_trainer import chat_templates, turns
from finetune_trainer.outcome import DataError, RecipeRefusedError
from finetune_trainer.prep import jinja_template
from finetune_trainer.prep.plan import CHOSEN, MESSAGES, PROMPT, REJECTED, TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe

_MARK = "the chat template of the model fails on "


def texts(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> list[str]:
    """Return the texts that training makes of an example: its conversation, or the prompt of a preference with either answer.

    Args:
        example: columns of the table, by name.

    Raises:
        ValueError: the template does not take it; `failure` finds the sentence in what Spark says of it.
    """
    given = (
        [example[MESSAGES]] if MESSAGES in example else [example[PROMPT], example[CHOSEN], example[REJECTED]]
    )
    try:
        return [
            chat_templates.render(tokenizer, conversation, turns.tools(example.get(TOOLS)))
            for conversation in _conversations([turns.messages(messages) for messages in given])
        ]
    except chat_templates.FAILURES as error:
        roles = ", ".join(str(turn["role"]) for messages in given for turn in messages)
        raise ValueError(f"{_MARK}a conversation of the roles {roles}: {error}") from error


def _conversations(given: list[list[turns.Message]]) -> list[list[turns.Message]]:
    if len(given) == 1:
        return given
    prompt, *answers = given
    replies = [turns.reply(prompt, answer) for answer in answers]
    if any(all(turns.is_blank(message) for message in reply) for reply in replies):
        raise ValueError("an answer adds nothing to the prompt")
    return [[*prompt, *reply] for reply in replies]


def check(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Check that a tokenizer has a chat template, and that this renders tools where the recipe names a column of them.

    Raises:
        RecipeRefusedError: it has none, or it leaves out tools and data.prepare.unrenderable is Fail.
    """
    base, columns, prepare = recipe.model.base, recipe.data.columns, recipe.data.prepare
    if tokenizer.chat_template is None:
        raise RecipeRefusedError(
            f"conversations need a chat template, and the tokenizer of {base} has none: set model.chatTemplate"
        )
    drops = prepare is not None and prepare.unrenderable == "Drop"
    if columns and columns.tools and not drops and not chat_templates.renders_tools(tokenizer):
        raise RecipeRefusedError(
            f"data.columns.tools needs a chat template that renders tools, and that of {base} does not: set "
            "model.chatTemplate, remove data.columns.tools, or drop conversations that have tools with "
            "data.prepare.unrenderable: Drop"
        )


def failure(said: str) -> DataError | None:
    """Return the error of an example that a template did not take, from the text of Spark's exception."""
    marks = f"{re.escape(_MARK)}|data[.]prepare[.][a-zA-Z]+ {re.escape(jinja_template.MARK)}"
    found = re.search(f"ValueError: ((?:{marks}).*)", said)
    if found is None:
        return None
    return DataError(
        "TemplateFailed", f"{found.group(1).rstrip('.')}; drop such rows with data.prepare.unrenderable: Drop"
    )
