"""Margins of preferences: by how much the chosen answer is better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from finetune_trainer.prep.expressions.template import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from finetune_trainer.prep.plan import Form

COLUMN = "__finetune_margin"
"""Column with the margin, in addition to the columns of the source."""


def as_number(name: str) -> Column:
    """Return the margins in a column of numbers or texts as numbers; null for a margin that is not a finite number."""
    number = sf.col(quoted(name)).try_cast("double")
    # NB: Spark orders NaN above infinity.
    return sf.when(sf.abs(number) < sf.lit(math.inf), number)


def with_margins(frame: DataFrame, form: Form) -> DataFrame:
    """Convert the margins of a source to numbers."""
    return frame if form.margin is None else frame.withColumn(form.margin, as_number(form.margin))
