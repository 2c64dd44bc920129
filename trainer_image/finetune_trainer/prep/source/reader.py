"""Reads a source at one version, and checks that its columns fit the recipe."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from finetune_crds.base import join_names
from finetune_trainer.examples import chat_messages
from finetune_trainer.examples.columns import Column, Kind
from finetune_trainer.examples.file_formats import (
    BYTES,
    MAPS,
    STRUCTURES,
    explain_label_type,
    explain_lists,
    explain_missing,
    explain_twins,
    explain_type,
)
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.expressions.content import is_conversation
from finetune_trainer.prep.source import delta_table, files, hub, inference_table, text_files
from finetune_trainer.prep.source.location import Place
from finetune_trainer.prep.spark import metastore, session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.catalog import Catalog
    from finetune_crds.source import NamedSource, Source, TableLocation
    from finetune_trainer.prep.plan import Plan

_NESTED = (ArrayType, StructType, MapType)
_NUMBERS_AND_BOOLEANS = (IntegralType, FloatType, DoubleType, BooleanType)
_TIMES = (DateType, TimestampType, TimestampNTZType)
# Types whose values can be written as text.
_PLAIN = (StringType, NullType, *_NUMBERS_AND_BOOLEANS, DecimalType, *_TIMES)
# Types that are not learned, with their names in messages.
_UNLEARNED: dict[type[DataType], str] = {BinaryType: BYTES, MapType: MAPS, StructType: STRUCTURES}


@dataclass(frozen=True)
class Corpus:
    """A source as a DataFrame, and what was read.

    version: the version of a Delta table.
    revision: the commit of a Hub data set.
    identity: equal for equal rows of the source, as far as can be determined without reading them.
    feedback_version: the version of the table of feedback.
    texts: the text files, whose lines must be checked before the rows are read; None for other files.
    table: the table or data set of the files, for messages; empty if the recipe names the files themselves.
    """

    frame: DataFrame
    version: int | None = None
    revision: str | None = None
    feedback_version: int | None = None
    identity: str = ""
    texts: text_files.TextFiles | None = None
    table: str = ""

    @property
    def at(self) -> str:
        """The version or commit that was read, for a message; it begins with a space unless it is empty."""
        if self.revision is not None:
            return f" at commit {self.revision}"
        return f" version {self.version}" if self.version is not None else ""


def read(
    spark: SparkSession,
    source: Source | NamedSource,
    scratch: Path,
    field: str = "data.source",
    catalog: Catalog | None = None,
    *,
    columns_type: str = "Messages",
) -> Corpus:
    """Read a source, other than a mix, at one version, so that every pass reads the same rows.

    Args:
        scratch: folder for what is downloaded; it must stay until the rows have been read.
        field: the recipe's field that holds the source, for messages.
        catalog: the catalog that finds tables by name.
        columns_type: the kind of example to make of an inference table, as in `Columns`: Messages, Preference or Unpaired.

    Raises:
        RecipeRefusedError: the data set requires its own loading script.
        DataError: the source or its version is missing, or the pod has no access to it.
        TrainingError: the Hub or a catalog does not answer.
    """
    if source.type == "Hub":
        paths, commit = hub.fetch(source, scratch, field)
        frame = files.frame(spark, "Parquet", paths)
        return Corpus(frame, revision=commit, identity=commit, table=f"the data set {source.address}")
    if source.type == "InferenceTable":
        return _read_inference_table(spark, source, field, catalog, columns_type)
    place = _locate(source, field, source.type, catalog)
    if source.type == "Delta":
        frame, version, table_id = delta_table.read(spark, source, place, field)
        table = f"the Delta table {source.address}"
        return Corpus(frame, version, identity=f"{table_id}@{version}", table=table)
    if place is None:
        # NB: a catalog does not show which files a Parquet table had, so the identity is random, and no other job reuses the rows.
        frame = metastore.read_parquet(spark, source.table or "", f"{field}.table")
        return Corpus(frame, identity=uuid.uuid4().hex, table=f"the table {source.table}")
    frame, listing, texts = files.read(spark, source, place, field)
    return Corpus(frame, identity=listing, texts=texts)


def _read_inference_table(
    spark: SparkSession, source: Source, field: str, catalog: Catalog | None, columns_type: str
) -> Corpus:
    """Read an inference table and its feedback, each at one version; raises as `read` and `inference_table.join_feedback` do."""
    feedback = source.feedback
    assert feedback is not None  # noqa: S101 - the schema requires it
    place = _locate(source, field, "Delta", catalog)
    inference_rows, version, table_id = delta_table.read(spark, source, place, field)
    feedback_field = f"{field}.feedback"
    place = _locate(feedback, feedback_field, "Delta", catalog)
    feedback_rows, feedback_version, feedback_id = delta_table.read(spark, feedback, place, feedback_field)
    rows = inference_table.join_feedback(inference_rows, feedback_rows, feedback, columns_type, field)
    requests = inference_table.identify_rated_requests(inference_rows, feedback_rows, feedback, field)
    return Corpus(
        rows,
        version,
        feedback_version=feedback_version,
        identity=f"{table_id}@{requests} {feedback_id}@{feedback_version}",
        table=f"the inference table {source.address}",
    )


def _locate(source: TableLocation, field: str, kind: str, catalog: Catalog | None) -> Place | None:
    """Return the location of a source of a type; None for a table that the session finds by its name.

    Raises:
        DataError: a table has no catalog, or Unity Catalog denies access to it.
        TrainingError: the catalog does not answer.
    """
    if source.path is not None:
        return Place(session.spark_path(source.path))
    if session.on_databricks():
        return None
    if catalog is None:
        raise DataError(
            "MissingCatalog",
            f"{field}.table {source.table} needs a catalog: set data.prepare.catalog, or use path with the location of the table",
        )
    if not catalog.is_unity:
        return None
    # The SDK takes half a second to import.
    from finetune_trainer.prep.source import unity_catalog

    return unity_catalog.locate(source.table or "", kind, f"{field}.table", catalog)


def check(frame: DataFrame, plan: Plan, where: str) -> None:
    """Check the columns that the recipe names; `where` is the source, for messages.

    Raises:
        DataError: a column is missing or has an unsupported type, a preference has lists that are not conversations, or values are to
            be replaced in lists or structures.
    """
    require(frame, plan.columns, where)
    form = plan.form
    require_texts(frame, _find_texts(plan), where)
    preference_columns = form.required if form.judged else ()
    for name in preference_columns:
        dtype = frame.schema[name].dataType
        if name == form.label:
            if _classify_type(dtype) not in ("label", "text"):
                raise DataError("WrongColumnType", explain_label_type(name, where, dtype.simpleString()))
        elif name == form.margin:
            if not isinstance(dtype, NumericType | StringType):
                raise DataError(
                    "WrongColumnType",
                    f"column {name} of {where} holds {dtype.simpleString()}, and margins are numbers: correct data.columns.margin",
                )
        elif not isinstance(dtype, ArrayType):
            require_texts(frame, [name], where)
        elif not is_conversation(dtype):
            raise DataError(
                "WrongColumnType",
                f"column {name} of {where} holds {dtype.simpleString()}: prompts and answers are text, or lists of "
                "{role, content}",
            )
    for name in (column for template in plan.form.jinja for column in template.columns):
        dtype = frame.schema[name].dataType
        if plan.prepare.redact and isinstance(dtype, _NESTED):
            raise DataError(
                "WrongColumnType",
                f"data.prepare.redact replaces values in text, and column {name} of {where} holds "
                f"{dtype.simpleString()}: remove the column from the templates, or convert it to text in the source",
            )


def _find_texts(plan: Plan) -> list[str]:
    """Return the columns whose values become text: all but conversations, tools, labels, judged answers and columns of Jinja templates."""
    form = plan.form
    as_is = {*form.spoken, *(column for template in form.jinja for column in template.columns)}
    structured = {form.tools, form.label, *(form.required if form.judged else ())}
    return [name for name in form.content if name not in as_is | structured]


def jinja_values(frame: DataFrame, plan: Plan) -> set[str]:
    """Return the columns that Jinja templates get as they are: numbers, booleans, lists and structures; others are text.

    If values are to be redacted, only booleans stay as they are: as text, false would count as true.
    """
    columns = {column for template in plan.form.jinja for column in template.columns}
    types = BooleanType if plan.prepare.redact else _NUMBERS_AND_BOOLEANS + _NESTED
    return {name for name in columns if isinstance(frame.schema[name].dataType, types)}


def is_nested(kind: DataType) -> bool:
    """Whether a column holds lists or structures."""
    return isinstance(kind, _NESTED)


def find_conversations(frame: DataFrame, weight: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the columns that hold lists of {role, content}, each with the other fields of messages that are kept.

    For example, `{"messages": ("tool_calls", "weight")}`.

    Args:
        weight: the field of the source that is kept as `chat_messages.WEIGHT`. Default: the field of this name.
    """
    # The source fields that become a kept field; any other kept field has its own name in the source.
    source_fields = {
        chat_messages.WEIGHT: {weight or chat_messages.WEIGHT},
        "tool_calls": {"tool_calls", chat_messages.LEGACY_CALL},
    }
    types = {field.name: field.dataType for field in frame.schema.fields if is_conversation(field.dataType)}

    def list_carried(message_type: StructType) -> tuple[str, ...]:
        names = set(message_type.fieldNames())
        return tuple(
            carried for carried in chat_messages.CARRIED if names & source_fields.get(carried, {carried})
        )

    return {
        name: list_carried(dtype.elementType)
        for name, dtype in types.items()
        if isinstance(dtype, ArrayType) and isinstance(dtype.elementType, StructType)
    }


def require(frame: DataFrame, names: Sequence[str], where: str) -> None:
    """Check that columns exist.

    Raises:
        DataError: a column is missing, or another column has its name in another case.
    """
    columns = [column.name for column in list_columns(frame)]
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError("MissingColumn", explain_missing(missing, where, columns))
    for name in names:
        if ambiguous := explain_twins(name, where, columns):
            raise DataError("ColumnsAmbiguous", ambiguous)


def require_texts(frame: DataFrame, names: Sequence[str], where: str) -> None:
    """Check that the values of columns can be written as text.

    Raises:
        DataError: the values of a column cannot.
    """
    for name in names:
        dtype = frame.schema[name].dataType
        if isinstance(dtype, ArrayType):
            raise DataError("WrongColumnType", explain_lists(name))
        if not isinstance(dtype, _PLAIN):
            unlearned = _UNLEARNED.get(type(dtype), dtype.simpleString())
            raise DataError("WrongColumnType", explain_type(name, where, unlearned))


def list_columns(frame: DataFrame) -> list[Column]:
    """Return the columns of the source, without the extra columns of `plain_text.written` and of `inference_table`."""
    added = (inference_table.LEFT_OUT, inference_table.LEFT_OUT_TEXT)
    fields = [
        field
        for field in frame.schema.fields
        if field.name not in added and not plain_text.is_written(field.name)
    ]
    return [
        Column(field.name, _classify_type(field.dataType), field.dataType.simpleString()) for field in fields
    ]


def _classify_type(dtype: DataType) -> Kind:
    if isinstance(dtype, StringType):
        return "text"
    if isinstance(dtype, BooleanType | IntegralType):
        return "label"
    return "messages" if is_conversation(dtype) else "other"


def describe_columns(frame: DataFrame) -> str:
    """Return the available columns, for a message."""
    return f"it has {join_names(sorted(column.name for column in list_columns(frame)))}"
