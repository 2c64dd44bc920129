"""`spec.data`: where the examples come from, what they are, and how they become splits."""

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
"""The fields of Columns that each type has, each of which is the name of its column unless it is set."""
OPTIONAL_COLUMN_FIELDS: dict[str, tuple[str, ...]] = {"Messages": ("tools",)}
"""The fields of Columns that an example of a type may have too; they have no default."""


# Types whose examples have a prompt, as a CEL list.
_PROMPTED_TYPES = str(["PromptResponse", "Preference", "Unpaired"])
_PROMPTED_TYPES_TEXT = "PromptResponse, Preference or Unpaired"
"""The same types in a sentence."""


def _column_rule(field: str) -> Rule:
    """The rule that a field of Columns is set with its types only."""
    fields_by_type = (*COLUMN_FIELDS.items(), *OPTIONAL_COLUMN_FIELDS.items())
    types = [columns_type for columns_type, fields in fields_by_type if field in fields]
    message = f"{field} can be set only when type is {join_names(types, 'or')}"
    return Rule(f"!has(self.{field}) || self.type in {types}", message, f".{field}")


class Columns(ApiModel):
    """Which columns hold an example."""

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
    """What an example is. Text: plain text. Messages: a conversation. PromptResponse: a prompt and its answer. Preference: a
    prompt, a preferred answer, and another one (DPO, ORPO, SimPO), each of them text or a list of {role, content}. Unpaired: a
    prompt, an answer, and whether it is a good one (KTO); prompt and answer are text or a list of {role, content}."""
    text: Name | None = None
    """Column with the whole example as plain text. Default: text."""
    messages: Name | None = None
    """Column with a list of {role, content}; the model's chat template renders it. A message may have tool_calls, tool_call_id,
    name and weight. Default: messages."""
    message_weight: Name | None = None
    """Field of a message, not a column: 1 or true where the loss is on this answer, 0 or false where it is not. The loss is on
    answers without it. Default: weight."""
    tools: Name | None = None
    """Column with the tools that the assistant may call: a list of definitions, or the same as JSON text. The model's chat
    template renders them. Default: conversations have no tools."""
    prompt: Name | None = None
    """Column with the prompt. Default: prompt."""
    response: Name | None = None
    """Column with the answer to the prompt. Default: response."""
    chosen: Name | None = None
    """Column with the preferred answer. Default: chosen."""
    rejected: Name | None = None
    """Column with the answer that was not preferred. Default: rejected."""
    completion: Name | None = None
    """Column with an answer that people judged by itself (KTO). Default: completion."""
    label: Name | None = None
    """Column that says whether completion is a good answer (KTO): true or false, as a boolean, as 1 or 0, or as text. Default:
    label."""

    @property
    def column_names(self) -> list[str]:
        """The columns, in the order of the fields."""
        return [name for field in self._fields if (name := getattr(self, field))]

    @property
    def content_columns(self) -> list[str]:
        """The columns that hold what an example says: all but its label."""
        return [name for field in self._fields if field != "label" and (name := getattr(self, field))]

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*COLUMN_FIELDS[self.type], *OPTIONAL_COLUMN_FIELDS.get(self.type, ()))

    @model_validator(mode="before")
    @classmethod
    def _fill_in_columns(cls, columns: object) -> object:
        """The columns with the default name of each that the type has."""
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
"""Where splits are."""


class Splits(ApiModel):
    """Prepared splits: training starts without a preparation."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'Delta' ? has(self.path) && !has(self.train) && !has(self.validation) && !has(self.test) "
                ": has(self.train) && !has(self.path) && !has(self.version)",
                "type Delta requires path and allows version; the other types require train and allow validation and test",
            ),
        )
    )

    type: Literal["Delta", "Parquet", "JSONLines"]
    """What the splits are: one Delta table with a split column, or files for each split."""
    path: SplitsUri | None = None
    """The Delta table. Its `split` column holds train, validation or test."""
    version: NonNegative | None = None
    """Version of the Delta table. Default: the newest when training starts."""
    train: SplitsUri | None = None
    """Folder or file with the training split."""
    validation: SplitsUri | None = None
    """Folder or file with the split that the evaluations of training use."""
    test: SplitsUri | None = None
    """Folder or file with the split that spec.evaluation uses; training never reads it."""


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
                "!has(part.path) || part.path != self.prepare.output)))",
                "prepare.output must not be the path of a source: set another folder",
                ".prepare.output",
            ),
            (
                "!has(self.prepare) || self.prepare.spark.mode != 'Databricks' || !has(self.source) || "
                "((!has(self.source.path) || !self.source.path.startsWith('/') || self.source.path.startsWith('/Volumes/')) "
                "&& (!has(self.source.sources) || self.source.sources.all(part, !has(part.path) || "
                "!part.path.startsWith('/') || part.path.startsWith('/Volumes/'))))",
                "source.path must not be a local path when prepare.spark.mode is Databricks: set table, or use "
                "s3://bucket/folder or /Volumes/catalog/schema/volume",
                ".source",
            ),
            *cleaning.DATA_RULES,
            *catalog.DATA_RULES,
        )
    )

    source: Source | None = None
    """The raw corpus."""
    columns: Columns | None = None
    """Which columns hold an example. Default: found in the schema of the data; see status.data.columns."""
    prepare: Prepare | None = None
    """How the source becomes splits. Default: exact duplicates are removed, and the rest is split."""
    splits: Splits | None = None
    """Prepared splits."""

    @model_validator(mode="before")
    @classmethod
    def _add_preparation(cls, fields: object) -> object:
        """The data with a preparation, if there is a source."""
        if isinstance(fields, dict) and fields.get("source") and not fields.get("prepare"):
            return {**fields, "prepare": {}}
        return fields
