"""The steps from rows to examples. Both passes over a source run them: the preparation, and the search for a refused row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from finetune_trainer.examples.columns import find_table_columns
from finetune_trainer.prep.expressions import jinja_template
from finetune_trainer.prep.steps import conversations, labels, language, margins, redact, steps, tokens

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from finetune_crds.recipe import Recipe
    from finetune_trainer.examples.tokenizer import Loaded
    from finetune_trainer.prep.plan import Plan


def flag_rows(frame: DataFrame, plan: Plan) -> DataFrame:
    """Mark each row that a filter drops, see `steps.flag_rows`, and parse the conversations, tools, labels and margins of all rows."""
    # In a mix, `mix.mix_parts` has parsed conversations, tools and labels: to parse tools and labels again changes no
    # row that passes the filters.
    is_mix = steps.MIXED_FROM in frame.columns
    if not is_mix:
        frame = conversations.parse(frame, plan.form)
    # NB: without a mix, the filters see tools and labels as they are in the source.
    frame = steps.flag_rows(frame, plan)
    frame = conversations.with_tools(frame, plan.form)
    return margins.with_margins(labels.with_labels(frame, plan.form), plan.form)


def join_spoken_texts(plan: Plan) -> Column:
    """Return what the user and the assistant say in an example."""
    return sf.concat_ws("\n", *steps.spoken_texts(plan.form))


def redact_texts(frame: DataFrame, plan: Plan) -> DataFrame:
    """Redact the text of examples, if the recipe requests it; fail on text that is not UTF-8."""
    frame = steps.require_valid_text(frame, plan.form)
    return redact.redact_columns(frame, plan.form, plan.prepare.redact) if plan.prepare.redact else frame


def render(frame: DataFrame, plan: Plan) -> DataFrame:
    """Render the templates of examples, and add what identifies an example."""
    drop = plan.prepare.on_template_error == "Drop"
    return steps.identify_examples(jinja_template.render_templates(frame, plan.form.jinja, drop=drop), plan)


def select_refused(frame: DataFrame, recipe: Recipe, plan: Plan, tokenizer: Loaded) -> DataFrame:
    """Return the rows that fail a preparation whose data.prepare.onTemplateError is Fail, see `tokens.select_refused`.

    Only rows that pass the filters are returned; duplicates among them are not removed.

    Args:
        frame: rows of the source with their places.
    """
    frame = steps.select_passed(flag_rows(frame, plan), plan)
    if plan.prepare.languages:
        frame = language.with_foreign(frame, join_spoken_texts(plan), plan.prepare.languages)
        frame = frame.where(~sf.col(language.FOREIGN)).drop(language.FOREIGN)
    frame = frame.withColumn(jinja_template.REFUSAL, sf.lit(None).cast("string"))
    frame = render(redact_texts(frame, plan), plan)
    columns, day = find_table_columns(recipe.data), recipe.job.created
    return tokens.select_refused(frame, recipe.model, tokenizer, columns, recipe.objective, day=day)
