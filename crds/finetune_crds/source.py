"""`spec.data.source`: the raw corpus of a preparation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from finetune_crds.base import (
    FOLDER_FORMATS,
    ApiModel,
    Name,
    NonNegative,
    Rule,
    Uri,
    join_names,
    list_type_map,
    rules,
)

# NB: the result of the prep pod, with the names and versions of all sources, must fit into a termination message.
MAX_SOURCES = 16
SourceName = Annotated[str, Field(max_length=32, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
# NB: CEL can compare only strings with a maximum length.
Time = Annotated[AwareDatetime, Field(json_schema_extra={"maxLength": 64})]

_PATH = "^(/|(s3a?|gs)://[^/ ]+|abfss://[^/@ ]+@[^/@ ]+)"
_TABLE_TYPES = ["Delta", "Parquet", "InferenceTable"]
_HAS_NO_HUB_FIELDS = "!has(self.dataset) && !has(self.config) && !has(self.split) && !has(self.revision)"
_HAS_NO_LOCATION = f"!has(self.path) && !has(self.table) && {_HAS_NO_HUB_FIELDS}"
_HAS_ONE_LOCATION = (
    "(self.type == 'Hub' ? has(self.dataset) && !has(self.path) && !has(self.table) "
    f": {_HAS_NO_HUB_FIELDS} && (has(self.path) != has(self.table)) && (!has(self.table) || self.type in {_TABLE_TYPES}))"
)
_LOCATION_MESSAGE = "type Hub requires dataset, and allows config, split and revision; {mix}the other types require path, or table instead for {table_types}"
_ONE_VERSION = "!has(self.version) || !has(self.versionTime)"


_PATH_RULE = Rule(
    f"!has(self.path) || self.path.matches('{_PATH}')", f"path must be {FOLDER_FORMATS}", ".path"
)
_RULES = (
    _PATH_RULE,
    Rule(
        f"self.type in ['Delta', 'InferenceTable'] ? {_ONE_VERSION} : !has(self.version) && !has(self.versionTime)",
        "version and versionTime can be set only when type is Delta or InferenceTable, and only one of them",
    ),
)


class TableLocation(ApiModel):
    """The location of a table."""

    path: Uri | None = None
    """Folder or file: s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or
    a path on a volume of pods.prepare or pods.all."""
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
            _PATH_RULE,
            (_ONE_VERSION, "set version or versionTime, not both", ".versionTime"),
            (
                "has(self.ratingColumn) || has(self.correctionColumn) && !has(self.minRating)",
                "set ratingColumn, correctionColumn, or both; minRating requires ratingColumn",
            ),
        )
    )

    request_id_column: Name
    """Column with the id of the request."""
    logged_id_column: Name | None = None
    """Column of the inference table with the same id, such as client_request_id. Default: databricks_request_id, or
    else request_id."""
    rating_column: Name | None = None
    """Column that says whether the answer is good. It has the values of the label of KTO, or numbers when minRating is
    set."""
    min_rating: float | None = None
    """Answers with this rating, or a higher one, are good."""
    correction_column: Name | None = None
    """Column with the corrected answer as text."""
    time_column: Name | None = None
    """Column with the time of the feedback: the latest feedback on a request counts. A request whose feedback does not
    agree is otherwise dropped. Default: no column."""


class NamedSource(SourceLocation):
    """A source with a name, in a list of sources."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (_HAS_ONE_LOCATION, _LOCATION_MESSAGE.format(mix="", table_types="Delta and Parquet")), *_RULES
        )
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
                _LOCATION_MESSAGE.format(
                    mix="type Mix requires sources; ", table_types=join_names(_TABLE_TYPES)
                ),
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
    """Format of the corpus: Hub is a data set of the Hugging Face Hub, InferenceTable a table of the AI Gateway of
    Databricks, and Mix a mix of sources. Delta: a Delta table. Parquet, JSONLines, CSV: files."""
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
