"""Labels of unpaired preferences: whether an answer is good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.prep.expressions.labels import as_boolean

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from finetune_trainer.prep.plan import Form

COLUMN = "__finetune_label"
"""Column with the label, in addition to the columns of the source."""


def with_labels(frame: DataFrame, form: Form) -> DataFrame:
    """Convert the labels of a source to booleans."""
    return frame if form.label is None else frame.withColumn(form.label, as_boolean(frame, form.label))
