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
from finetune_crds.catalog import Catalog
from finetune_crds.chat import Conversation
from finetune_crds.pods import build_moved_fields
from finetune_crds.spark import Spark

OnTemplateError = Literal["Fail", "Drop"]
TemplateSyntax = Literal["Placeholders", "Jinja"]
Reuse = Literal["IfSame", "Never"]


class NearDedupe(ApiModel):
    """Removal of near duplicates."""

    threshold: Annotated[float, Field(ge=0.3, le=1)] = 0.7
    """Jaccard similarity, on runs of three words, from which on two examples are duplicates. MinHash finds candidates; each pair
    is compared exactly."""


class Dedupe(ApiModel):
    """Which duplicates are removed."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.columns) || self.exact", "dedupe.columns requires dedupe.exact true", ".columns"),
            (
                "!has(self.near) || self.exact",
                "dedupe.near requires dedupe.exact true: exact duplicates are removed first",
                ".near",
            ),
            (
                "!has(self.near) || !has(self.columns)",
                "dedupe.near and dedupe.columns must not both be set",
                ".near",
            ),
        )
    )

    exact: bool = True
    """Keep one of the examples whose text (all columns of the example) differs in case and white space only. Examples with another
    label are no duplicates."""
    columns: (
        Annotated[list[Name], Field(min_length=1, max_length=32, json_schema_extra=LIST_TYPE_SET)] | None
    ) = None
    """Columns whose text makes examples duplicates, such as the prompt alone. Default: all columns of the example."""
    near: NearDedupe | None = None
    """Also keep one of the examples in which the user and the assistant say nearly the same. System messages, tools and their results,
    and runs of words that many examples share, do not count."""


class SplitRatios(ApiModel):
    """How examples are divided into splits. Without stratifyBy, the split of an example depends on the seed and its key only."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.train + self.validation + self.test > 0.9999 "
                "&& self.train + self.validation + self.test < 1.0001",
                "train, validation and test must add up to 1 (defaults: 0.9, 0.05 and 0.05)",
            ),
            ("self.train > 0.0", "train must be above 0", ".train"),
        )
    )

    train: Fraction = 0.9
    """Share of the training split."""
    validation: Fraction = 0.05
    """Share of the split that evaluation uses."""
    test: Fraction = 0.05
    """Share of the held-out split."""
    seed: NonNegative = 42
    """Seed of the hash that divides the examples."""
    key: Name | None = None
    """Column whose equal values stay in one split, such as a conversation or a customer. Default: the text."""
    stratify_by: Name | None = None
    """Column whose values have the same share in each split, such as a language or a class. Examples with the same key stay in
    one split all the same."""


def _build_databricks_rule(condition: str, message: str, field: str) -> Rule:
    """A rule for preparations that run on Databricks."""
    return Rule(f"self.spark.mode != 'Databricks' || ({condition})", message, field)


_DATABRICKS_RULES = (
    _build_databricks_rule(
        "!has(self.output) || !self.output.startsWith('/')",
        "output must not be a local path when spark.mode is Databricks: use s3://bucket/folder, which the run writes through an "
        "external location and the training pods read",
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
    """The preparation, in the order of the fields: filters, languages, redaction, decontamination, dedupe and so on."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.minChars) || !has(self.maxChars) || self.minChars <= self.maxChars",
                "minChars must not be above maxChars",
                ".minChars",
            ),
            (
                "!has(self.minPromptChars) || !has(self.maxPromptChars) || self.minPromptChars <= self.maxPromptChars",
                "minPromptChars must not be above maxPromptChars",
                ".minPromptChars",
            ),
            (
                "!has(self.responseTemplate) || has(self.promptTemplate)",
                "responseTemplate can be set only when promptTemplate is set",
                ".responseTemplate",
            ),
            Rule(
                f"!has(self.output) || self.output.matches('{STORED_FOLDER_PATTERN}')",
                f"output must be {FOLDER_FORMATS}",
                ".output",
                at_creation=True,
            ),
            (
                "self.templateSyntax == 'Placeholders' || has(self.promptTemplate)",
                "templateSyntax Jinja requires promptTemplate",
                ".templateSyntax",
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
    """Delta table to write: s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute
    path on a volume. Each preparation writes a new version. Default: a folder in the storage that the operator is installed with, of
    all jobs of the namespace with the same preparation."""
    catalog: Catalog | None = None
    """Where tables are found that sources name by `table`. Default: the catalog that the operator is installed with; with spark.mode
    Databricks, the workspace."""
    reuse: Reuse = "IfSame"
    """Whether a version of the table that another job of the namespace wrote is used. IfSame: if its preparation and what it read
    are the same; while that job still prepares, this one waits. Never: the job prepares its own, by default in a folder of its
    own."""
    not_null: Annotated[list[Name], Field(max_length=32, json_schema_extra=LIST_TYPE_SET)] = Field(
        default_factory=list
    )
    """Columns that must not be null or blank, besides the columns of the example."""
    min_quality: float | None = None
    """Minimum quality score. Examples without a score are dropped."""
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
    """Languages of the examples to keep, as codes of ISO 639-1 such as en. An example in another language is dropped. One whose
    language is not certain, such as a short text or code, stays."""
    redact: cleaning.Redact | None = None
    """What to replace by a placeholder in the texts of an example: Email (<EMAIL>), Phone (<PHONE>), CardNumber (<CARD_NUMBER>,
    with a valid check digit), Secret (<SECRET>: keys and tokens of known services, passwords in URLs, private keys, JWTs). Patterns find these; a
    person's name or address they do not find."""
    decontaminate: cleaning.Decontaminate | None = None
    """Evaluation sets with which no example may share a run of words. Examples that do are dropped."""
    dedupe: Dedupe = Field(default_factory=Dedupe)
    """Which duplicates are removed. Default: exact ones."""
    prompt_template: LongText | None = None
    """Template of the prompt; {column} stands for the column's value, see templateSyntax. Without responseTemplate it renders
    the whole text.

    Preference and Unpaired data: it renders the prompt; the answers stay unchanged.
    """
    response_template: LongText | None = None
    """Template of the answer; {column} is replaced by the column's value. With it, the loss can cover the answer only."""
    template_syntax: TemplateSyntax = "Placeholders"
    """How promptTemplate and responseTemplate are written. Placeholders: {column} stands for a value, and a doubled brace for a
    brace. Jinja: Jinja templates, in a sandbox, with the columns as variables."""
    conversation: Conversation | None = None
    """Make each prompt and its answer a conversation of two turns, which the model's chat template renders. Templates render the
    content of the turns.

    Preference and Unpaired data: a conversation for each answer. Columns that hold conversations stay as they are.
    """
    on_template_error: OnTemplateError = "Fail"
    """What happens to an example that a template refuses: a conversation that the model's chat template does not take, or a row on which
    a Jinja template fails. Fail: the job fails. Drop: the example is dropped and counted."""
    max_tokens: Positive | None = None
    """Maximum length of an example in tokens of the model's tokenizer. Longer examples are dropped and counted.

    Preference data: prompt and chosen, plus prompt and rejected.
    """
    limit: Positive | None = None
    """Maximum number of examples; a seeded hash chooses them."""
    split_ratios: SplitRatios = Field(default_factory=SplitRatios)
    """How examples are divided into splits. Default: 0.9, 0.05 and 0.05 with seed 42."""
    report_samples: Annotated[int, Field(ge=0, le=20)] = 3
    """How many of the examples that a step dropped the report in the MLflow run shows; 0 shows none."""
    spark: Spark = Field(default_factory=Spark)
    """How Spark runs. Default: Local."""
