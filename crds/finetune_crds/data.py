"""`spec.data`: the source of the examples, their columns, and their preparation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, model_validator

from finetune_crds import catalog, cleaning
from finetune_crds.base import (
    ApiModel,
    Name,
    NonNegative,
    Rule,
    Uri,
    join_names,
    list_splits,
    rules,
    value_or_empty,
)
from finetune_crds.databricks import IN_WORKSPACE
from finetune_crds.prepare import Prepare
from finetune_crds.source import Source

ColumnsType = Literal["Text", "Messages", "PromptResponse", "Preference", "Unpaired"]
COLUMN_FIELDS: dict[str, tuple[str, ...]] = {
    "Text": ("text",),
    "Messages": ("messages",),
    "PromptResponse": ("prompt", "response"),
    "Preference": ("prompt", "chosen", "rejected"),
    "Unpaired": ("prompt", "completion", "label"),
}
"""The required fields of Columns by type. The default column of a field has the name of the field."""
OPTIONAL_COLUMN_FIELDS: dict[str, tuple[str, ...]] = {"Messages": ("tools",), "Preference": ("margin",)}
"""The optional fields of Columns by type. They have no default column."""


# Types whose examples have a prompt, as a CEL list.
_PROMPTED_TYPES = str(["PromptResponse", "Preference", "Unpaired"])
_PROMPTED_TYPES_TEXT = "PromptResponse, Preference or Unpaired"
"""The types whose examples have a prompt, in a sentence."""


# CEL: a rule that begins with this holds for data from another type of source.
_NO_INFERENCE_TABLE_OR = "!has(self.source) || self.source.type != 'InferenceTable' || "
# The types of columns that an inference table becomes.
_EXCHANGE_TYPES = ["Messages", "Preference", "Unpaired"]
# CEL: the columns are those that an inference table becomes. The preparation checks the rules again with these columns.
_HAS_EXCHANGE_COLUMNS = " && ".join(
    [
        f"self.columns.type in {_EXCHANGE_TYPES}",
        *(
            f"(!has(self.columns.{field}) || self.columns.{field} == '{field}')"
            for field in dict.fromkeys(name for kind in _EXCHANGE_TYPES for name in COLUMN_FIELDS[kind])
        ),
        "!has(self.columns.tools)",
        "!has(self.columns.messageWeight)",
    ]
)


# CEL on Data with a source: the paths of its sources and its feedback; a source without a path has an empty text.
_SOURCE_PATHS = (
    f"[{value_or_empty('self.source.path')}, has(self.source.feedback) && {value_or_empty('self.source.feedback.path')}] + "
    f"(has(self.source.sources) ? self.source.sources.map(part, {value_or_empty('part.path')}) : [])"
)


def _column_rules() -> Iterator[Rule]:
    """Iterate over the rules that fields of Columns can be set only with some types, one for the fields of the same types."""
    types_by_field = {"messageWeight": ["Messages"]}
    for columns_type, required_fields in COLUMN_FIELDS.items():
        for field in (*required_fields, *OPTIONAL_COLUMN_FIELDS.get(columns_type, ())):
            types_by_field.setdefault(field, []).append(columns_type)
    fields_by_types: dict[tuple[str, ...], list[str]] = {}
    for field, types in types_by_field.items():
        fields_by_types.setdefault(tuple(types), []).append(field)
    for allowed_types, fields in fields_by_types.items():
        is_set = " || ".join(f"has(self.{field})" for field in fields)
        yield Rule(
            f"self.type in {[*allowed_types]} || !({is_set})",
            f"{join_names(fields)} can be set only when type is {join_names(allowed_types, 'or')}",
        )


class Columns(ApiModel):
    """The columns of an example."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *_column_rules(),
        )
    )

    type: ColumnsType
    """Kind of example: plain text (Text), a conversation (Messages), prompt and answer (PromptResponse), prompt, chosen
    and rejected answer (Preference), or prompt, answer and label (Unpaired). DPO, ORPO, SimPO and RewardModel require
    Preference, and KTO requires Unpaired. In Preference and Unpaired, prompts and answers are text or lists of {role,
    content}."""
    text: Name | None = None
    """Column with the whole example as plain text. Default: text."""
    messages: Name | None = None
    """Column with a list of {role, content}; the model's chat template renders it. A message can also have tool_calls,
    tool_call_id, name and weight. Default: messages."""
    message_weight: Name | None = None
    """Field of a message, not a column: 0 or false excludes the answer from the loss. The loss covers answers with 1 or
    true, and answers without this field. Default: weight."""
    tools: Name | None = None
    """Column with the tools that the assistant can call. It has a list of definitions, or the list as JSON text. The
    chat template of the model renders them. Default: no tools."""
    prompt: Name | None = None
    """Column with the prompt. Default: prompt."""
    response: Name | None = None
    """Column with the answer to the prompt. Default: response."""
    chosen: Name | None = None
    """Column with the chosen answer. Default: chosen."""
    rejected: Name | None = None
    """Column with the rejected answer. Default: rejected."""
    completion: Name | None = None
    """Column with the labeled answer (KTO). Default: completion."""
    label: Name | None = None
    """Column with the label of the answer (KTO): true or 1 if the answer is good. As a boolean, a number, or text.
    Default: label."""
    margin: Name | None = None
    """Column with a number that says by how much the chosen answer is better (RewardModel). The loss aims at this difference
    of the rewards. Default: no margin."""

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, in the order of the fields."""
        return [name for field in self._fields if (name := getattr(self, field))]

    @property
    def content_columns(self) -> list[str]:
        """The names of the columns with the content of an example: all columns except the label and the margin."""
        return [
            name
            for field in self._fields
            if field not in ("label", "margin") and (name := getattr(self, field))
        ]

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*COLUMN_FIELDS[self.type], *OPTIONAL_COLUMN_FIELDS.get(self.type, ()))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_columns(cls, columns: object) -> object:
        """Fill in the default column of each required field of the type."""
        if not isinstance(columns, dict):
            return columns
        names = {field: field for field in COLUMN_FIELDS.get(str(columns.get("type")), ())}
        return names | {field: value for field, value in columns.items() if value is not None}


def parse_table(name: str) -> tuple[str, int | None]:
    """Return the name of a table without its version, and the version: 3 for main.support.chats@v3; None without one."""
    table, _, version = name.partition("@v")
    return table, int(version) if version else None


# CEL: the end of a condition that a split is the name of a table.
_NAMES_TABLE = "matches('^[^.@/ ]+[.][^.@/ ]+[.][^.@/ ]+(@v[0-9]{1,18})?$')"


# CEL on Splits: the addresses of the splits, with an empty text for a split that is not set.
_SPLITS = list_splits("self")


class Splits(ApiModel):
    """Prepared splits, which training reads without a preparation."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'Delta' ? has(self.path) && !has(self.train) && !has(self.validation) && !has(self.test) "
                ": has(self.train) && !has(self.path) && !has(self.version)",
                "type Delta requires path and allows version; the other types require train and allow validation and test",
            ),
            (
                f"self.type != 'Tables' || {_SPLITS}.all(name, name == '' || name.{_NAMES_TABLE})",
                "type Tables requires names of tables: catalog.schema.table, or catalog.schema.table@v3 for version 3",
            ),
            Rule(
                f"(has(self.path) ? [self.path] : {_SPLITS}).all(uri, !uri.{IN_WORKSPACE})",
                "the training pods cannot read /Volumes or dbfs:/ of a Databricks workspace: put the splits in an object store",
                at_creation=True,
            ),
        )
    )

    type: Literal["Delta", "Tables", "Parquet", "JSONLines"]
    """Format of the splits: one Delta table with a split column (Delta), or for each split a table in Unity Catalog
    (Tables) or files (Parquet, JSONLines)."""
    path: Uri | None = None
    """The Delta table, whose column `split` contains train, validation or test."""
    version: NonNegative | None = None
    """Version of the Delta table. Default: the newest version when training starts."""
    train: Uri | None = None
    """Folder or file with the training split, or its table: catalog.schema.table, with @v3 at its end for version 3. Default:
    the newest version when training starts."""
    validation: Uri | None = None
    """Folder or file with the validation split, for evaluations during training."""
    test: Uri | None = None
    """Folder or file with the test split, for spec.evaluation. Training never reads it."""

    @property
    def are_delta_tables(self) -> bool:
        """Whether the splits are in Delta tables: in one with a split column, or in one each."""
        return self.type in ("Delta", "Tables")

    @property
    def tables(self) -> dict[str, str]:
        """The names of the tables by split, with @v3 at the end if version 3 is to be read; empty for other types."""
        names = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: name for split, name in names.items() if name} if self.type == "Tables" else {}

    @property
    def address(self) -> str:
        """The table with the splits, or the table or the files of the training split."""
        training_table, _ = parse_table(self.tables.get("train", ""))
        return self.path or training_table or self.train or ""

    @property
    def versions(self) -> str:
        """The versions to read, such as 3, or train=3,test=0 for tables of splits; empty if they are not known, or for files."""
        if self.version is not None:
            return str(self.version)
        versions = {split: parse_table(name)[1] for split, name in self.tables.items()}
        return ",".join(f"{split}={version}" for split, version in versions.items() if version is not None)

    def pin(self, versions: str) -> Splits:
        """Return the splits at versions, written as in `versions`. Versions that these splits name, and files, stay as they are."""
        if self.type == "Delta" and self.version is None and versions.isdecimal():
            return self.model_copy(update={"version": int(versions)})
        versions_by_split = dict(item.split("=", 1) for item in versions.split(",") if "=" in item)
        pinned_tables = {
            split: f"{name}@v{versions_by_split[split]}"
            for split, name in self.tables.items()
            if parse_table(name)[1] is None and versions_by_split.get(split, "").isdecimal()
        }
        return self.model_copy(update=pinned_tables)


class Data(ApiModel):
    """The examples: a source and its preparation, or prepared splits."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.source) != has(self.splits) && (!has(self.prepare) || has(self.source))",
                "set exactly one of source and splits; prepare can be set only when source is set",
            ),
            (
                "!has(self.prepare) || !has(self.source) || self.prepare.spark.mode == 'Local' || (self.source.type != 'Hub' "
                "&& (!has(self.source.sources) || self.source.sources.all(part, part.type != 'Hub')))",
                "source.type Hub requires prepare.spark.mode Local, which downloads the data set into the prep pod",
                ".prepare.spark",
            ),
            (
                "!has(self.prepare) || !has(self.prepare.promptTemplate) || !has(self.columns) || "
                "self.columns.type != 'Messages'",
                "prepare.promptTemplate must not be set when columns.type is Messages",
                ".prepare.promptTemplate",
            ),
            (
                "!has(self.prepare) || (!has(self.prepare.minPromptChars) && !has(self.prepare.maxPromptChars) && "
                f"!has(self.prepare.conversation)) || !has(self.columns) || self.columns.type in {_PROMPTED_TYPES}",
                "prepare.minPromptChars, maxPromptChars and conversation can be set only when columns.type is "
                f"{_PROMPTED_TYPES_TEXT}",
                ".prepare",
            ),
            (
                "!has(self.prepare) || self.prepare.onTemplateError == 'Fail' || has(self.prepare.conversation) || "
                "self.prepare.templateSyntax == 'Jinja' || !has(self.columns) || "
                "self.columns.type in ['Messages', 'Preference', 'Unpaired']",
                "prepare.onTemplateError Drop requires a template that can fail: set columns.type to Messages, Preference or "
                "Unpaired, set prepare.conversation, or set prepare.templateSyntax to Jinja",
                ".prepare.onTemplateError",
            ),
            (
                "!has(self.prepare) || !has(self.prepare.responseTemplate) || !has(self.columns) || "
                "!(self.columns.type in ['Preference', 'Unpaired'])",
                "prepare.responseTemplate must not be set when columns.type is Preference or Unpaired",
                ".prepare.responseTemplate",
            ),
            (
                f"!has(self.prepare) || !has(self.prepare.output) || !has(self.source) || !(self.prepare.output in ({_SOURCE_PATHS}))",
                "prepare.output must not be the path of a source: set another folder",
                ".prepare.output",
            ),
            (
                "!has(self.prepare) || self.prepare.spark.mode != 'Databricks' || !has(self.source) || "
                f"({_SOURCE_PATHS}).all(path, !path.startsWith('/') || path.startsWith('/Volumes/'))",
                "source.path must not be a local path when prepare.spark.mode is Databricks: set table, or use "
                "s3://bucket/folder or /Volumes/catalog/schema/volume",
                ".source",
            ),
            (
                f"{_NO_INFERENCE_TABLE_OR}!has(self.columns) || ({_HAS_EXCHANGE_COLUMNS})",
                "source.type InferenceTable makes columns of type Messages, Preference or Unpaired with their default names: "
                "remove columns",
                ".columns",
            ),
            (
                f"{_NO_INFERENCE_TABLE_OR}(has(self.prepare) && self.prepare.onTemplateError == 'Drop' && "
                "!has(self.prepare.promptTemplate) && !has(self.prepare.responseTemplate) && !has(self.prepare.conversation))",
                "source.type InferenceTable, whose examples are conversations, requires prepare.onTemplateError Drop, without "
                "prepare.promptTemplate, responseTemplate and conversation",
                ".prepare",
            ),
            *cleaning.DATA_RULES,
            *catalog.DATA_RULES,
        )
    )

    source: Source | None = None
    """The raw corpus."""
    columns: Columns | None = None
    """Columns of an example. Default: detected from the schema of the data; see status.data.columns."""
    prepare: Prepare | None = None
    """Preparation of the source. Default: exact duplicates are removed, and the rest is split."""
    splits: Splits | None = None
    """Prepared splits, instead of a source."""

    @model_validator(mode="before")
    @classmethod
    def _add_preparation(cls, fields: object) -> object:
        """Add a preparation with its defaults if there is a source."""
        if isinstance(fields, dict) and fields.get("source") and not fields.get("prepare"):
            return {**fields, "prepare": {}}
        return fields
