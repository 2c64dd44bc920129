"""Conversations that the model's chat template rejects, in Spark's Python workers.

NB: only the text of a worker's exception reaches the driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import answer_end, loss_mask, template_omissions
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from finetune_trainer.prep.expressions import jinja_template

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe

_MARK = "the chat template of the model fails on "


def build_refusal(example: Mapping[str, Any], error: DataError) -> ValueError:
    """Return the error of an example that the chat template rejects. `find_failure` finds its sentence in Spark's message.

    Args:
        example: columns of the table, by name.
        error: the error of `documents`; its cause is the error of the template.
    """
    conversations = [value for value in example.values() if isinstance(value, list)]
    roles = ", ".join(str(turn["role"]) for messages in conversations for turn in messages)
    return ValueError(f"{_MARK}a conversation with the roles {roles}: {error.__cause__ or error}")


def check(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Check that a tokenizer has a chat template, and that this renders tools where the recipe names a column of them.

    Raises:
        RecipeRefusedError: there is no template, it ignores tools and data.prepare.onTemplateError is Fail, or its blocks that mark
            answers are empty.
    """
    base, columns, prepare = recipe.model.base, recipe.data.columns, recipe.data.prepare
    if tokenizer.chat_template is None:
        raise RecipeRefusedError(
            f"the tokenizer of {base} has no chat template, which conversations require: set model.chatTemplate"
        )
    if recipe.objective.loss_on != "All":
        loss_mask.check_template(tokenizer, base)
    if missing := answer_end.explain_missing_stop(tokenizer):
        print(f"NB: {missing}", flush=True)
    drops = prepare is not None and prepare.on_template_error == "Drop"
    if columns and columns.tools and not drops and not template_omissions.renders_tools(tokenizer):
        raise RecipeRefusedError(
            f"data.columns.tools requires a chat template that renders tools, and the one of {base} does not: set "
            "model.chatTemplate, remove data.columns.tools, or drop conversations with tools by "
            "data.prepare.onTemplateError: Drop"
        )


def find_failure(message: str) -> DataError | None:
    """Return the error of an example that a template rejected, from the text of Spark's exception."""
    marks = f"{re.escape(_MARK)}|data[.]prepare[.][a-zA-Z]+ {re.escape(jinja_template.MARK)}"
    match = re.search(f"ValueError: ((?:{marks}).*)", message)
    if match is None:
        return None
    return DataError(
        "TemplateFailed",
        f"{match.group(1).rstrip('.')}; to drop these rows, set data.prepare.onTemplateError: Drop",
    )
