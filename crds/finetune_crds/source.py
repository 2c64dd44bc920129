"""`spec.data.source`: the raw corpus of a preparation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from finetune_crds.base import FOLDER_FORMATS, ApiModel, Name, NonNegative, Rule, Uri, list_type_map, rules

# NB: the result of the prep pod, with the names and versions of all sources, must fit into a termination message.
MAX_SOURCES = 16
SourceName = Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
# NB: CEL can compare only strings with a maximum length.
Time = Annotated[AwareDatetime, Field(json_schema_extra={"maxLength": 64})]

_PATH = "^(/|(s3a?|gs)://[^/ ]+|abfss://[^/@ ]+@[^/@ ]+)"
_HAS_NO_LOCATION = "!has(self.path) && !has(self.table) && !has(self.dataset)"
_HAS_ONE_LOCATION = (
    "(self.type == 'Hub' ? has(self.dataset) && !has(self.path) && !has(self.table) "
    ": !has(self.dataset) && (has(self.path) != has(self.table)))"
)
_LOCATION_MESSAGE = (
    "type Hub requires dataset, {mix}and the other types require exactly one of path and table"
)


_LOCATION_RULES = (
    Rule(f"!has(self.path) || self.path.matches('{_PATH}')", f"path must be {FOLDER_FORMATS}", ".path"),
    Rule(
        "!has(self.version) || !has(self.versionTime)", "set version or versionTime, not both", ".versionTime"
    ),
)
_RULES = (
    Rule(
        "!has(self.table) || self.type in ['Delta', 'Parquet', 'InferenceTable']",
        "table can be set only when type is Delta, Parquet or InferenceTable: otherwise set path",
        ".table",
    ),
    *_LOCATION_RULES,
    Rule(
        "self.type in ['Delta', 'InferenceTable'] || (!has(self.version) && !has(self.versionTime))",
        "version and versionTime can be set only when type is Delta or InferenceTable",
    ),
    Rule(
        "self.type == 'Hub' || (!has(self.config) && !has(self.split) && !has(self.revision))",
        "config, split and revision can be set only when type is Hub",
    ),
)


class TableLocation(ApiModel):
    """The location of a table."""

    path: Uri | None = None
    """Folder or file: s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an
    absolute path on a volume of pods.prepare or pods.all."""
    table: Name | None = None
    """Name of a table in prepare.catalog: catalog.schema.table, or database.table in a Hive metastore."""
    version: NonNegative | None = None
    """Version of the Delta table to read. Default: the newest when preparation starts; see status.data."""
    version_time: Time | None = None
    """Read the version of the Delta table that was current at this time, such as 2026-11-01T00:00:00Z."""

    @property
    def address(self) -> str:
        """The path or the table."""
        return self.path or self.table or ""


class SourceLocation(TableLocation):
    """The location of a corpus."""

    dataset: Name | None = None
    """Hub data set id, such as tatsu-lab/alpaca."""
    config: Name | None = None
    """Configuration (subset) of the Hub data set. Default: its default configuration, or the only one."""
    split: Name | None = None
    """Split of the Hub data set to read. Default: train, or the only split."""
    revision: Name | None = None
    """Branch, tag or commit of the Hub data set. Default: main; see status.data for the commit."""

    @property
    def address(self) -> str:
        """The path, the table or the data set."""
        return super().address or self.dataset or ""


class Feedback(TableLocation):
    """Feedback on logged answers: a Delta table with one row for each feedback."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.path) != has(self.table)", "set exactly one of path and table"),
            *_LOCATION_RULES,
            (
                "has(self.ratingColumn) || has(self.correctionColumn)",
                "set ratingColumn, correctionColumn, or both",
            ),
            (
                "!has(self.minRating) || has(self.ratingColumn)",
                "minRating can be set only when ratingColumn is set",
                ".minRating",
            ),
        )
    )

    request_id_column: Name
    """Column with the id of the request."""
    logged_id_column: Name | None = None
    """Column of the inference table with the same id, such as client_request_id. Default: databricks_request_id, or
    request_id where the table has no such column."""
    rating_column: Name | None = None
    """Column that says whether the answer is good: as the label of KTO, or as a number when minRating is set."""
    min_rating: float | None = None
    """Answers with this rating, or a higher one, are good."""
    correction_column: Name | None = None
    """Column with the corrected answer as text."""
    time_column: Name | None = None
    """Column with the time of the feedback: the latest feedback on a request counts. Default: feedback on a request must
    agree, otherwise the request is dropped."""


class NamedSource(SourceLocation):
    """A source with a name, in a list of sources."""

    model_config = ConfigDict(
        json_schema_extra=rules((_HAS_ONE_LOCATION, _LOCATION_MESSAGE.format(mix="")), *_RULES)
    )

    name: SourceName
    """Name of the source, unique in the list."""
    type: Literal["Delta", "Parquet", "JSONLines", "CSV", "Hub"]
    """Format of the corpus, as in data.source."""


class MixedSource(NamedSource):
    """A source of a mix."""

    name: SourceName
    """Name of the source in the mix, also in the column `source` of the prepared table."""
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Share of the source's rows in the mix, relative to the other weights."""


class Source(SourceLocation):
    """The raw corpus."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"self.type == 'Mix' ? has(self.sources) && {_HAS_NO_LOCATION} : !has(self.sources) && {_HAS_ONE_LOCATION}",
                _LOCATION_MESSAGE.format(mix="type Mix requires sources, "),
            ),
            (
                "(self.type == 'InferenceTable') == has(self.feedback)",
                "type InferenceTable requires feedback, and the other types forbid it",
                ".feedback",
            ),
            *_RULES,
        )
    )

    type: Literal["Delta", "Parquet", "JSONLines", "CSV", "Hub", "InferenceTable", "Mix"]
    """Format of the corpus: a Delta table; Parquet, JSON lines or CSV files; a data set of the Hugging Face Hub; an inference
    table of Databricks' AI Gateway; or a mix of several sources."""
    feedback: Feedback | None = None
    """Feedback on the answers of an inference table."""
    sources: (
        Annotated[
            list[MixedSource],
            Field(min_length=1, max_length=MAX_SOURCES, json_schema_extra=list_type_map("name")),
        ]
        | None
    ) = None
    """The sources of a mix. The source with the fewest rows relative to its weight is read completely; the others are
    sampled to their share."""

    @property
    def tables(self) -> list[tuple[str, TableLocation]]:
        """What is read, other than evaluation sets, each with its field: the sources of a mix, or this source and its feedback."""
        if self.sources:
            return [(f"data.source.sources[{part.name}]", part) for part in self.sources]
        feedback = [("data.source.feedback", self.feedback)] if self.feedback else []
        return [("data.source", self), *feedback]

    @property
    def parts(self) -> list[Source | MixedSource]:
        """The sources of a mix; otherwise, only this source."""
        return [*self.sources] if self.sources else [self]

    @property
    def address(self) -> str:
        """The location of the corpus, or the names of the mixed sources."""
        names = [part.name for part in self.sources or []]
        return f"the mix of {', '.join(names)}" if names else super().address
