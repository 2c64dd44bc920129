"""Reads the raw corpus at a pinned version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, DataType, StringType, StructType

from finetune_trainer.columns import Column, Kind
from finetune_trainer.outcome import DataError
from finetune_trainer.prep import delta_table, files, hub
from finetune_trainer.prep.plan import CHOSEN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.source import NamedSource, Source
    from finetune_trainer.prep.plan import Plan


@dataclass(frozen=True)
class Corpus:
    """A source as a DataFrame, and what was read: the version of a Delta table, the commit of a Hub data set.

    identity: the same for the same rows of the source, as far as can be told without reading them.
    """

    frame: DataFrame
    version: int | None = None
    revision: str | None = None
    identity: str = ""

    @property
    def at(self) -> str:
        """What was read, for a message; it begins with a space unless it is empty."""
        if self.revision is not None:
            return f" at commit {self.revision}"
        return f" version {self.version}" if self.version is not None else ""


def read(
    spark: SparkSession, source: Source | NamedSource, scratch: Path, field: str = "data.source"
) -> Corpus:
    """Read a source, other than a mix, at one version, so that every pass reads the same rows.

    Args:
        scratch: folder for what is downloaded; it must stay until the rows have been read.
        field: the recipe's field that holds the source, for messages.

    Raises:
        RecipeRefusedError: the Hub does not have the data set, or closes it to the pod.
        DataError: the source or its version is missing.
        TrainingError: the Hub does not answer.
    """
    if source.type == "Delta":
        frame, version, table = delta_table.read(spark, source, field)
        return Corpus(frame, version, identity=f"{table}@{version}")
    if source.type == "Hub":
        paths, commit = hub.fetch(source, scratch, field)
        return Corpus(files.frame(spark, "Parquet", paths), revision=commit, identity=commit)
    frame, listing = files.read(spark, source, field)
    return Corpus(frame, identity=listing)


def check(frame: DataFrame, plan: Plan, where: str) -> None:
    """Check the columns that the recipe names; `where` is the source, for messages.

    Raises:
        DataError: one of them is missing, or a preference holds lists.
    """
    require(frame, plan.columns, where)
    preference = plan.form.required if CHOSEN in plan.form.rendered else ()
    for name in preference:
        kind = frame.schema[name].dataType
        if isinstance(kind, ArrayType):
            raise DataError(
                "WrongColumnType",
                f"column {name} of {where} holds {kind.simpleString()}: preferences are prepared as text; "
                "for lists of {role, content}, name files that need no preparation in data.splits",
            )


def require(frame: DataFrame, names: Sequence[str], where: str) -> None:
    """Check that columns exist.

    Raises:
        DataError: one of them is missing.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError("MissingColumn", f"{where} has no column {_and(missing)}: {has(frame)}")


def schema(frame: DataFrame) -> list[Column]:
    """Return the columns of the source."""
    fields = frame.schema.fields
    return [Column(field.name, _kind(field.dataType), field.dataType.simpleString()) for field in fields]


def _kind(kind: DataType) -> Kind:
    if isinstance(kind, StringType):
        return "text"
    return "messages" if is_conversation(kind) else "other"


def is_conversation(kind: DataType) -> bool:
    """Whether values are lists of {role, content}."""
    return (
        isinstance(kind, ArrayType)
        and isinstance(kind.elementType, StructType)
        and {"role", "content"} <= set(kind.elementType.fieldNames())
    )


def has(frame: DataFrame) -> str:
    """Return the available columns, for a message."""
    return f"it has {_and(sorted(frame.columns))}"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
