"""`spec.data.prepare`: the steps from a source to splits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds import cleaning
from finetune_crds.base import (
    FOLDER_FORMATS,
    LIST_TYPE_SET,
    STORED_FOLDER_PATTERN,
    ApiModel,
    Fraction,
    LongText,
    Name,
    NonNegative,
    Positive,
    ReplacedField,
    Rule,
    Uri,
    replaced,
    rules,
)
from finetune_crds.catalog import PREPARE_RULES as CATALOG_RULES
from finetune_crds.catalog import Catalog, TableName
from finetune_crds.chat import Conversation
from finetune_crds.databricks import IN_WORKSPACE
from finetune_crds.pods import build_moved_fields
from finetune_crds.spark import Spark

OnTemplateError = Literal["Fail", "Drop"]
TemplateSyntax = Literal["Placeholders", "Jinja"]
Reuse = Literal["IfSame", "Never"]


class NearDedupe(ApiModel):
    """Removal of near duplicates."""

    threshold: Annotated[float, Field(ge=0.3, le=1)] = 0.7
    """Minimum Jaccard similarity of two duplicates, on runs of three words. MinHash finds candidate pairs, and each pair is
    compared exactly."""


class Dedupe(ApiModel):
    """Removal of duplicates."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.columns) && !has(self.near) || self.exact && !(has(self.columns) && has(self.near))",
                "dedupe.columns and dedupe.near require dedupe.exact true, and must not both be set",
            ),
        )
    )

    exact: bool = True
    """Keep one of several examples whose texts (all columns) differ only in case and white space. Examples with different
    labels are not duplicates."""
    columns: (
        Annotated[list[Name], Field(min_length=1, max_length=32, json_schema_extra=LIST_TYPE_SET)] | None
    ) = None
    """Columns to compare, such as only the prompt. Default: all columns of the example."""
    near: NearDedupe | None = None
    """Also keep only one of several examples with nearly the same messages of user and assistant. System messages, tools,
    tool results, and runs of words that many examples share are not compared."""


class SplitRatios(ApiModel):
    """Shares of the splits. Without stratifyBy, the split of an example depends only on the seed and the key of the example."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.train + self.validation + self.test > 0.9999 "
                "&& self.train + self.validation + self.test < 1.0001",
                "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
            ),
        )
    )

    train: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the training split."""
    validation: Fraction = 0.05
    """Share of the validation split."""
    test: Fraction = 0.05
    """Share of the test split."""
    seed: NonNegative = 42
    """Seed of the hash that divides the examples."""
    key: Name | None = None
    """Column whose equal values, such as a customer, stay in the same split. Default: the text."""
    stratify_by: Name | None = None
    """Column to balance: each of its values, such as a language, has the same share in every split. Examples with the same
    key still stay in one split."""


class SplitTables(ApiModel):
    """Delta tables, one for each split."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(!has(self.validation) || self.validation != self.train) && (!has(self.test) || (self.test != self.train && "
                "(!has(self.validation) || self.test != self.validation)))",
                "train, validation and test must be different tables",
            ),
        )
    )

    train: TableName
    """Table of the training split."""
    validation: TableName | None = None
    """Table of the validation split. Default: it is not saved."""
    test: TableName | None = None
    """Table of the test split. Default: it is not saved."""

    @property
    def by_split(self) -> dict[str, str]:
        """The tables by their splits."""
        names = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: name for split, name in names.items() if name}


def _build_databricks_rule(condition: str, message: str, field: str) -> Rule:
    """Return a rule for preparations on Databricks."""
    return Rule(f"self.spark.mode != 'Databricks' || ({condition})", message, field)


_DATABRICKS_RULES = (
    _build_databricks_rule(
        "!has(self.output) || !self.output.startsWith('/')",
        "output must not be a local path when spark.mode is Databricks: use s3://bucket/folder",
        ".output",
    ),
    _build_databricks_rule(
        "!has(self.filter) || !has(self.spark.databricks) || (has(self.spark.databricks.compute) && "
        "self.spark.databricks.compute.type != 'Serverless')",
        "filter requires a cluster when spark.mode is Databricks: serverless compute cannot check it",
        ".filter",
    ),
)


class Prepare(ApiModel):
    """The preparation. Its steps run in the order of the fields: filters, languages, redaction, decontamination, dedupe and so on."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(!has(self.minChars) || !has(self.maxChars) || self.minChars <= self.maxChars) && "
                "(!has(self.minPromptChars) || !has(self.maxPromptChars) || self.minPromptChars <= self.maxPromptChars)",
                "minChars must not be above maxChars, and minPromptChars must not be above maxPromptChars",
            ),
            (
                "has(self.promptTemplate) || !has(self.responseTemplate) && self.templateSyntax == 'Placeholders'",
                "responseTemplate and templateSyntax Jinja require promptTemplate",
                ".promptTemplate",
            ),
            (
                f"!has(self.output) || !self.output.{IN_WORKSPACE}",
                "output must not be in a Databricks workspace: the training pods cannot read it",
                ".output",
            ),
            Rule(
                f"!has(self.output) || self.output.matches('{STORED_FOLDER_PATTERN}')",
                f"output must be {FOLDER_FORMATS}",
                ".output",
                at_creation=True,
            ),
            *cleaning.PREPARE_RULES,
            *CATALOG_RULES,
            *_DATABRICKS_RULES,
        )
        | replaced(
            **build_moved_fields(
                "image",
                "env",
                "envFrom",
                "podTemplate",
                prefix="data.prepare.",
                settings="prepare",
                container="prep",
            ),
            unrenderable=ReplacedField(
                "string", "data.prepare.unrenderable", "replaced by data.prepare.onTemplateError"
            ),
        )
    )

    output: Uri = ""
    """Delta table to write, with the formats of checkpoint.uri. Each preparation writes a new version. Default: a
    folder in defaults.storage of the chart, for all jobs of the namespace with the same preparation."""
    split_tables: SplitTables | None = None
    """Also save the splits as tables with these names, for other readers; requires spark.mode Databricks or a catalog
    of type Hive. Training reads output. Each preparation replaces the rows of the tables."""
    catalog: Catalog | None = None
    """Catalog of tables that are named. Default: defaults.catalog of the chart; when spark.mode is Databricks, the catalog of
    the workspace."""
    reuse: Reuse = "IfSame"
    """Whether to use a table that another job of the namespace prepared from the same sources in the same way (IfSame),
    or no other table (Never). IfSame: this job waits while the other job still prepares the table. Never: the default
    output is a folder of this job."""
    not_null: Annotated[list[Name], Field(max_length=32, json_schema_extra=LIST_TYPE_SET)] = Field(
        default_factory=list
    )
    """Columns that must not be null or blank, in addition to the columns of the example."""
    min_quality: float | None = None
    """Minimum quality score; examples without a score are dropped."""
    quality_column: Name = "quality"
    """Column with the quality score."""
    min_chars: NonNegative | None = None
    """Minimum length of an example in characters."""
    max_chars: Positive | None = None
    """Maximum length of an example in characters."""
    min_prompt_chars: NonNegative | None = None
    """Minimum length of the prompt column in characters."""
    max_prompt_chars: Positive | None = None
    """Maximum length of the prompt column in characters."""
    filter: LongText | None = None
    """Spark SQL condition that an example must meet, such as `language = 'en'`."""
    languages: cleaning.Languages | None = None
    """Languages to keep, as ISO 639-1 codes such as en; examples in another language are dropped. Examples of uncertain
    language, such as short texts or code, are kept."""
    redact: cleaning.Redact | None = None
    """Values to replace by placeholders; they are found by patterns, which find no names or addresses of people. Email:
    <EMAIL>. Phone: <PHONE>. CardNumber, if the check digit is valid: <CARD_NUMBER>. Secret: <SECRET>, for keys and
    tokens of known services, passwords in URLs, private keys and JWTs."""
    decontaminate: cleaning.Decontaminate | None = None
    """Evaluation sets; examples that share a run of words with a set are dropped."""
    dedupe: Dedupe = Field(default_factory=Dedupe)
    """Removal of duplicates. Default: exact duplicates."""
    prompt_template: LongText | None = None
    """Template of the prompt, or of the whole text without responseTemplate; {column} stands for the value of the
    column. See templateSyntax. Preference and Unpaired data: the template renders the prompt, and the answers do not
    change."""
    response_template: LongText | None = None
    """Template of the answer; {column} stands for the column's value. With it, the loss can cover only the answer."""
    template_syntax: TemplateSyntax = "Placeholders"
    """Syntax of the templates: {column} (Placeholders), or Jinja in a sandbox, with the columns as variables (Jinja).
    Placeholders: a doubled brace stands for a brace."""
    conversation: Conversation | None = None
    """Make each prompt and its answer a conversation, which the model's chat template renders. promptTemplate and
    responseTemplate render its messages.

    Preference and Unpaired data: each answer becomes a conversation. Conversations in columns do not change.
    """
    on_template_error: OnTemplateError = "Fail"
    """Reaction to an example on which the model's chat template or a Jinja template fails. Fail: the job fails. Drop: the
    example is dropped and counted."""
    max_tokens: Positive | None = None
    """Maximum length of an example in tokens of the tokenizer of the model; longer examples are dropped. Preference
    data: prompt plus chosen, plus prompt plus rejected."""
    limit: Positive | None = None
    """Maximum number of examples; a seeded hash chooses them."""
    split_ratios: SplitRatios = Field(default_factory=SplitRatios)
    """Shares of the splits. Default: 0.9, 0.05 and 0.05 with seed 42."""
    report_samples: Annotated[int, Field(ge=0, le=20)] = 3
    """Number of dropped examples that the report in the MLflow run shows for each step. 0: no examples."""
    spark: Spark = Field(default_factory=Spark)
    """How Spark runs. Default: Local."""
