"""`spec.data`: the source of the examples, their columns, and their preparation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from finetune_crds import catalog, cleaning
from finetune_crds.base import (
    ApiModel,
    Name,
    NonNegative,
    Rule,
    Uri,
    join_names,
    rules,
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


def _column_rule(field: str) -> Rule:
    """Return the rule that a field of Columns can be set only with some types."""
    fields_by_type = (*COLUMN_FIELDS.items(), *OPTIONAL_COLUMN_FIELDS.items())
    types = [columns_type for columns_type, fields in fields_by_type if field in fields]
    message = f"{field} can be set only when type is {join_names(types, 'or')}"
    return Rule(f"!has(self.{field}) || self.type in {types}", message, f".{field}")


class Columns(ApiModel):
    """The columns of an example."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                _column_rule(field)
                for field in (
                    "text",
                    "messages",
                    "tools",
                    "prompt",
                    "response",
                    "chosen",
                    "rejected",
                    "completion",
                    "label",
                    "margin",
                )
            ),
            (
                "!has(self.messageWeight) || self.type == 'Messages'",
                "messageWeight can be set only when type is Messages",
                ".messageWeight",
            ),
        )
    )

    type: ColumnsType
    """Kind of example. Text: plain text. Messages: a conversation. PromptResponse: a prompt and its answer. Preference: a
    prompt, a chosen answer and a rejected answer (DPO, ORPO, SimPO, RewardModel). Unpaired: a prompt, an answer, and a label that says
    whether the answer is good (KTO). In Preference and Unpaired, prompts and answers are text or lists of {role, content}."""
    text: Name | None = None
    """Column with the whole example as plain text. Default: text."""
    messages: Name | None = None
    """Column with a list of {role, content}; the model's chat template renders it. A message can also have tool_calls,
    tool_call_id, name and weight. Default: messages."""
    message_weight: Name | None = None
    """Field of a message, not a column. 1 or true: the loss covers this answer. 0 or false: it does not. The loss covers
    answers without this field. Default: weight."""
    tools: Name | None = None
    """Column with the tools that the assistant can call: a list of definitions, or the list as JSON text. The model's chat
    template renders them. Default: no tools."""
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
    """Column with the label of the answer (KTO): true if the answer is good, otherwise false; as a boolean, as 1 or 0, or as
    text. Default: label."""
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


SplitsUri = Annotated[
    Uri,
    Field(
        json_schema_extra=rules(
            Rule(
                f"!self.{IN_WORKSPACE}",
                "the training pods cannot read /Volumes or dbfs:/ of a Databricks workspace: put the splits in an object store",
                at_creation=True,
            )
        )
    ),
]
"""The address of splits."""


def parse_table(name: str) -> tuple[str, int | None]:
    """Return the name of a table without its version, and the version: 3 for main.support.chats@v3; None without one."""
    table, _, version = name.partition("@v")
    return table, int(version) if version else None


# CEL: the end of a condition that a split is the name of a table.
_NAMES_TABLE = "matches('^[^.@/ ]+[.][^.@/ ]+[.][^.@/ ]+(@v[0-9]{1,18})?$')"


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
                f"self.type != 'Tables' || ((!has(self.train) || self.train.{_NAMES_TABLE}) && (!has(self.validation) || "
                f"self.validation.{_NAMES_TABLE}) && (!has(self.test) || self.test.{_NAMES_TABLE}))",
                "type Tables requires names of tables: catalog.schema.table, or catalog.schema.table@v3 for version 3",
            ),
        )
    )

    type: Literal["Delta", "Tables", "Parquet", "JSONLines"]
    """Format of the splits. Delta: one table with a split column. Tables: a Delta table for each split, by its name in the Unity
    Catalog of a Databricks workspace. Parquet, JSONLines: files for each split."""
    path: SplitsUri | None = None
    """The Delta table. The column `split` contains train, validation or test."""
    version: NonNegative | None = None
    """Version of the Delta table. Default: the newest version when training starts."""
    train: SplitsUri | None = None
    """Folder or file with the training split, or its table: catalog.schema.table, with @v3 at its end for version 3. Default:
    the newest version when training starts."""
    validation: SplitsUri | None = None
    """Folder or file with the validation split, for evaluations during training."""
    test: SplitsUri | None = None
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
            ("has(self.source) != has(self.splits)", "set exactly one of source and splits"),
            (
                "!has(self.prepare) || has(self.source)",
                "prepare can be set only when source is set",
                ".prepare",
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
                "!has(self.prepare) || (!has(self.prepare.minPromptChars) && !has(self.prepare.maxPromptChars)) || "
                f"!has(self.columns) || self.columns.type in {_PROMPTED_TYPES}",
                f"prepare.minPromptChars and maxPromptChars can be set only when columns.type is {_PROMPTED_TYPES_TEXT}",
                ".prepare",
            ),
            (
                "!has(self.prepare) || !has(self.prepare.conversation) || !has(self.columns) || "
                f"self.columns.type in {_PROMPTED_TYPES}",
                f"prepare.conversation can be set only when columns.type is {_PROMPTED_TYPES_TEXT}",
                ".prepare.conversation",
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
                "!has(self.prepare) || !has(self.prepare.output) || !has(self.source) || ((!has(self.source.path) || "
                "self.prepare.output != self.source.path) && (!has(self.source.sources) || self.source.sources.all(part, "
                "!has(part.path) || part.path != self.prepare.output)) && (!has(self.source.feedback) || "
                "!has(self.source.feedback.path) || self.source.feedback.path != self.prepare.output))",
                "prepare.output must not be the path of a source: set another folder",
                ".prepare.output",
            ),
            (
                "!has(self.prepare) || self.prepare.spark.mode != 'Databricks' || !has(self.source) || "
                "((!has(self.source.path) || !self.source.path.startsWith('/') || self.source.path.startsWith('/Volumes/')) "
                "&& (!has(self.source.sources) || self.source.sources.all(part, !has(part.path) || "
                "!part.path.startsWith('/') || part.path.startsWith('/Volumes/'))) && (!has(self.source.feedback) || "
                "!has(self.source.feedback.path) || !self.source.feedback.path.startsWith('/') || "
                "self.source.feedback.path.startsWith('/Volumes/')))",
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
                f"{_NO_INFERENCE_TABLE_OR}(has(self.prepare) && self.prepare.onTemplateError == 'Drop')",
                "source.type InferenceTable requires prepare.onTemplateError Drop: a logged conversation that the chat template "
                "refuses must not fail the job",
                ".prepare.onTemplateError",
            ),
            (
                f"{_NO_INFERENCE_TABLE_OR}!has(self.prepare) || (!has(self.prepare.promptTemplate) && "
                "!has(self.prepare.responseTemplate) && !has(self.prepare.conversation))",
                "prepare.promptTemplate, responseTemplate and conversation must not be set when source.type is InferenceTable: "
                "its examples are conversations",
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
