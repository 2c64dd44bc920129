"""Checks that the model's chat template can render the conversations of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.examples import answer_end, loss_mask, template_omissions
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe


def check(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Check that a tokenizer has a chat template that fits the recipe; warn if servers would not stop after an answer.

    Raises:
        RecipeRefusedError: the model has no chat template, the template ignores tools and data.prepare.onTemplateError is Fail, or answers
            would not be learned up to their ends.
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
    # With Drop, the conversations that have tools are dropped, and the others are kept.
    drops_refused_rows = prepare is not None and prepare.on_template_error == "Drop"
    must_render_tools = columns and columns.tools and not drops_refused_rows
    if must_render_tools and not template_omissions.renders_tools(tokenizer):
        raise RecipeRefusedError(
            f"data.columns.tools requires a chat template that renders tools, and the one of {base} does not: set "
            "model.chatTemplate, remove data.columns.tools, or drop conversations with tools by "
            "data.prepare.onTemplateError: Drop"
        )
