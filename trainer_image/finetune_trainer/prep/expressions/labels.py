"""Spark expressions for labels: whether an answer is good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, StringType

from finetune_trainer.examples.column_values import LABELS
from finetune_trainer.prep.expressions.template import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def as_boolean(frame: DataFrame, name: str) -> Column:
    """Return the labels in a column of booleans, integers or texts as booleans; null for an invalid label.

    1 and the texts true and 1 mean True; 0 and the texts false and 0 mean False. The case of a text does not matter.
    """
    column = sf.col(quoted(name))
    kind = frame.schema[name].dataType
    if isinstance(kind, BooleanType):
        return column
    if isinstance(kind, StringType):
        word = sf.lower(sf.regexp_replace(column, r"(?U)^\s+|\s+$", ""))
        good = [text for text, is_good in LABELS.items() if is_good]
        bad = [text for text, is_good in LABELS.items() if not is_good]
        return sf.when(word.isin(good), sf.lit(True)).when(word.isin(bad), sf.lit(False))
    return sf.when(column == 1, sf.lit(True)).when(column == 0, sf.lit(False))
