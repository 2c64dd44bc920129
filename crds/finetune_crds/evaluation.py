"""The evaluation of a registered version, before its aliases move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    LIST_TYPE_SET,
    OPERATOR_DEFAULT,
    ApiModel,
    LongText,
    Name,
    NonNegative,
    Positive,
    Rule,
    join_names,
    list_type_map,
    replaced,
    rules,
)
from finetune_crds.own_script import Parameters
from finetune_crds.pods import build_moved_fields
from finetune_crds.training import SOFT_PROMPT_METHODS

Metric = Literal["Loss", "Perplexity", "ExactMatch", "Accuracy", "F1", "Rouge", "Bleu"]
EvaluatedSplit = Literal["Test", "Validation"]

# The numbers of each metric, by the names that they have as tags of the version and as metrics of the run.
NUMBER_NAMES: dict[Metric, tuple[str, ...]] = {
    "Loss": ("evaluation_loss",),
    "Perplexity": ("evaluation_perplexity",),
    "ExactMatch": ("eval_exact_match",),
    "Accuracy": ("eval_accuracy",),
    "F1": ("eval_f1",),
    "Rouge": ("eval_rouge1", "eval_rouge2", "eval_rougeL"),
    "Bleu": ("eval_bleu",),
}
BASE_PREFIX = "base_"
"""Begins the name of a number of the base model."""
GENERATED: tuple[Metric, ...] = ("ExactMatch", "Accuracy", "F1", "Rouge", "Bleu")
"""Metrics of the answers that the model generates."""

MAX_METRIC_NAME = 64
METRIC_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
MAX_METRICS = 24
"""Unity Catalog takes 50 tags of a version, which also has those of the trainer, of spec.register and of promotions. The built-in
evaluation writes 9 numbers of each of two models, a command of your own one of each."""
MetricName = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME, pattern=METRIC_NAME)]
"""A name that is allowed for a metric of MLflow and for a tag of Unity Catalog."""

_HAS_COMMAND = "(has(self.command) && size(self.command) > 0)"
# NB: none of these has a default in the schema, which would look like a value beside a command.
_BUILT_IN_FIELDS = ("metrics", "baseModel", "limit", "generations", "maxNewTokens", "batchSize")


class Evaluation(ApiModel):
    """An evaluation of the registered version in a pod of its own, after the training and before the aliases move."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"{_HAS_COMMAND} || !has(self.args) || size(self.args) == 0",
                "args can be set only when command is set",
                ".args",
            ),
            Rule(
                f"{_HAS_COMMAND} || !has(self.parameters)",
                "parameters can be set only when command is set",
                ".parameters",
                at_creation=True,
            ),
            (
                f"!{_HAS_COMMAND} || !({' || '.join(f'has(self.{field})' for field in _BUILT_IN_FIELDS)})",
                f"{join_names(_BUILT_IN_FIELDS)} must not be set when command is set: they configure the built-in evaluation",
            ),
        )
        | replaced(
            **build_moved_fields(
                "image",
                "env",
                "envFrom",
                "podTemplate",
                prefix="evaluation.",
                settings="evaluate",
                container="evaluate",
            )
        )
    )

    split: EvaluatedSplit = "Test"
    """The rows: the test split, which training never reads, or the validation split."""
    metrics: (
        Annotated[list[Metric], Field(min_length=1, max_length=7, json_schema_extra=LIST_TYPE_SET)] | None
    ) = None
    """What to measure. ExactMatch, Accuracy, F1, Rouge and Bleu compare generated answers with those of the rows.
    Default: Loss and Perplexity."""
    base_model: Annotated[bool, Field(json_schema_extra=OPERATOR_DEFAULT)] = True
    """Evaluate the base model too, on the same rows."""
    limit: Positive | None = None
    """At most this many rows, the same ones for each model: those with the least hashes. Default: all."""
    generations: Annotated[int, Field(ge=0, le=1000, json_schema_extra=OPERATOR_DEFAULT)] = 20
    """Rows whose generated answers become a table of the MLflow run, those of both models side by side. 0: no table."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32768, json_schema_extra=OPERATOR_DEFAULT)] = 256
    """Longest generated answer in tokens."""
    batch_size: Annotated[int, Field(ge=1, le=1024, json_schema_extra=OPERATOR_DEFAULT)] = 8
    """Rows that are evaluated at once."""
    command: Annotated[list[LongText], Field(max_length=64)] = Field(default_factory=list)
    """Your own command. It finds the model in the folder MODEL_PATH, and writes a JSON object of numbers to the file METRICS_PATH.
    Default: the built-in evaluation."""
    args: Annotated[list[LongText], Field(max_length=256)] = Field(default_factory=list)
    """Arguments of that command."""
    parameters: Parameters = Field(default_factory=dict)
    """Parameters of your own command, of any JSON type. It reads them from HYPERPARAMETERS_PATH, a YAML file with nothing else."""

    @property
    def selected_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the built-in evaluation, in the order of the API."""
        metrics = self.metrics or ("Loss", "Perplexity")
        return tuple(metric for metric in NUMBER_NAMES if metric in metrics)


# Of FineTuneJobSpec: there is no evaluation or no data, or an evaluation with a command, which may read what it likes.
_NOT_BUILT_IN = "!has(self.evaluation) || !has(self.data) || (has(self.evaluation.command) && size(self.evaluation.command) > 0)"

EVALUATION_RULES = (
    Rule(
        "!has(self.evaluation) || has(self.register)",
        "evaluation can be set only when register is set",
        ".evaluation",
    ),
    Rule(
        f"{_NOT_BUILT_IN} || !has(self.data.columns) || self.data.columns.type != 'Unpaired'",
        "the built-in evaluation does not support data.columns.type Unpaired, whose answers can be bad: remove evaluation, or "
        "set evaluation.command",
        ".evaluation",
    ),
    Rule(
        f"{_NOT_BUILT_IN} || !has(self.evaluation.metrics) || !has(self.data.columns) || self.data.columns.type != 'Text' || "
        "(has(self.data.prepare) && has(self.data.prepare.responseTemplate)) || "
        f"self.evaluation.metrics.all(metric, !(metric in {list(GENERATED)}))",
        "data.columns.type Text has no answers to compare: set evaluation.metrics to Loss and Perplexity",
        ".evaluation.metrics",
    ),
    Rule(
        f"{_NOT_BUILT_IN} || !has(self.data.prepare) || !has(self.data.prepare.splitRatios) || (self.evaluation.split == 'Test' "
        "? self.data.prepare.splitRatios.test : self.data.prepare.splitRatios.validation) > 0.0",
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0, or change evaluation.split",
        ".evaluation.split",
    ),
    Rule(
        f"{_NOT_BUILT_IN} || !has(self.data.splits) || self.data.splits.type == 'Delta' || (self.evaluation.split == 'Test' "
        "? has(self.data.splits.test) : has(self.data.splits.validation))",
        "the split to evaluate has no rows: set its folder in data.splits, or change evaluation.split",
        ".evaluation.split",
    ),
    Rule(
        "!has(self.evaluation) || !has(self.evaluation.command) || size(self.evaluation.command) == 0 || "
        f"!(self.method.type in {list(SOFT_PROMPT_METHODS)})",
        "evaluation.command must not be set when method.type is PrefixTuning or PromptTuning: virtual tokens cannot be merged "
        "into the model",
        ".evaluation.command",
    ),
)
"""Rules of FineTuneJobSpec."""


class EvaluatedMetric(ApiModel):
    """A number of the evaluation."""

    name: MetricName
    """Its name, as a tag of the version and as a metric of the run."""
    value: float
    """That of the registered version."""
    base: float | None = None
    """That of the base model, on the same rows."""


class EvaluationStatus(ApiModel):
    """The evaluation of the registered version."""

    rows: NonNegative | None = None
    """Rows that were evaluated; absent with a command of your own."""
    digest: Annotated[str, Field(max_length=64)]
    """What the numbers are comparable on, as the version's tag finetune_evaluation_data has it: a digest of the rows and of how
    answers were generated; with a command of your own, of the image, the command, its parameters and the data."""
    metrics: Annotated[
        list[EvaluatedMetric], Field(max_length=MAX_METRICS, json_schema_extra=list_type_map("name"))
    ] = Field(default_factory=list)
    """The numbers."""


class EvaluationResult(ApiModel):
    """What the evaluation pod reports."""

    rows: NonNegative
    digest: Name
    metrics: dict[MetricName, float]
    """The numbers of the registered version, by their names."""
    base: dict[MetricName, float] = Field(default_factory=dict)
    """Those of the base model, by the same names."""
