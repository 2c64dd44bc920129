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

# The names of each metric's numbers, as tags of the version and as metrics of the run. Two have a longer prefix, since training writes
# eval_loss and eval_perplexity.
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
"""Prefix of the names of the base model's numbers."""
GENERATED: tuple[Metric, ...] = ("ExactMatch", "Accuracy", "F1", "Rouge", "Bleu")
"""Metrics that compare generated answers."""
REWARD_METRICS: tuple[Metric, ...] = ("Loss", "Accuracy")
"""Metrics of a reward model."""

MAX_METRIC_NAME = 64
METRIC_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
MAX_METRICS = 24
"""Maximum number of metrics, which become tags of the version. Unity Catalog allows 50 tags, and the trainer, spec.register and
promotions also set tags. The built-in evaluation sets 9 for each of two models, your own command one for each metric."""
MetricName = Annotated[str, Field(min_length=1, max_length=MAX_METRIC_NAME, pattern=METRIC_NAME)]
"""A name that MLflow accepts for a metric, and Unity Catalog for a tag."""

_HAS_COMMAND = "(has(self.command) && size(self.command) > 0)"
# NB: these fields have no default in the schema: the API server would fill in the default, and the rule below would refuse every
# evaluation with a command.
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
                f"{join_names(_BUILT_IN_FIELDS)} must not be set when command is set",
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
    """Split to evaluate: the test split, which training never reads, or the validation split."""
    metrics: (
        Annotated[list[Metric], Field(min_length=1, max_length=7, json_schema_extra=LIST_TYPE_SET)] | None
    ) = None
    """Metrics to compute; all but Loss and Perplexity compare generated answers with those in the data. Default: Loss
    and Perplexity; for RewardModel, Loss and Accuracy. Accuracy of a RewardModel: the share of pairs whose chosen
    answer has the higher reward."""
    base_model: Annotated[bool, Field(json_schema_extra=OPERATOR_DEFAULT)] = True
    """Evaluate the base model too, on the same rows."""
    limit: Positive | None = None
    """Maximum number of rows. They are those with the lowest hashes, the same for each model. Default: all rows."""
    generations: Annotated[int, Field(ge=0, le=1000, json_schema_extra=OPERATOR_DEFAULT)] = 20
    """Number of rows to log with the generated answers of both models. They are a table of the MLflow run. 0: no
    table."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32768, json_schema_extra=OPERATOR_DEFAULT)] = 256
    """Maximum length of a generated answer in tokens."""
    batch_size: Annotated[int, Field(ge=1, le=1024, json_schema_extra=OPERATOR_DEFAULT)] = 8
    """Number of rows in a batch."""
    command: Annotated[list[LongText], Field(max_length=64)] = Field(default_factory=list)
    """Your own command, which reads the model from the folder MODEL_PATH and writes its numbers to the file
    METRICS_PATH as a JSON object. Default: the built-in evaluation."""
    args: Annotated[list[LongText], Field(max_length=256)] = Field(default_factory=list)
    """Arguments of the command."""
    parameters: Parameters = Field(default_factory=dict)
    """Parameters of the command, of any JSON type, in the YAML file HYPERPARAMETERS_PATH."""

    @property
    def selected_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the built-in evaluation, in the order of the API."""
        metrics = self.metrics or ("Loss", "Perplexity")
        return tuple(metric for metric in NUMBER_NAMES if metric in metrics)


# CEL on FineTuneJobSpec: no evaluation, no data, or an evaluation with your own command, which can read any data.
_NOT_BUILT_IN = "!has(self.evaluation) || !has(self.data) || (has(self.evaluation.command) && size(self.evaluation.command) > 0)"


def _has_rows(split: str) -> str:
    """Return the CEL condition that a split of the data can have rows."""
    return (
        f"(!has(self.data.prepare) || !has(self.data.prepare.splitRatios) || self.data.prepare.splitRatios.{split} > 0.0) && "
        f"(!has(self.data.splits) || self.data.splits.type == 'Delta' || has(self.data.splits.{split}))"
    )


EVALUATION_RULES = (
    Rule(
        f"{_NOT_BUILT_IN} || !has(self.data.columns) || self.data.columns.type != 'Unpaired'",
        "the built-in evaluation does not support data.columns.type Unpaired: remove evaluation, or "
        "set evaluation.command",
        ".evaluation",
    ),
    Rule(
        f"{_NOT_BUILT_IN} || self.objective.type != 'RewardModel' || ((!has(self.evaluation.metrics) || "
        f"self.evaluation.metrics.all(metric, metric in {list(REWARD_METRICS)})) && !has(self.evaluation.maxNewTokens) && "
        "(!has(self.evaluation.generations) || self.evaluation.generations == 0))",
        "a reward model generates no answers: set evaluation.metrics to Loss and Accuracy, and remove "
        "evaluation.generations and evaluation.maxNewTokens",
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
        f"{_NOT_BUILT_IN} || (self.evaluation.split == 'Test' ? {_has_rows('test')} : {_has_rows('validation')})",
        "the split to evaluate has no rows: set its share in data.prepare.splitRatios above 0, set its folder in data.splits, or "
        "change evaluation.split",
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
    """Name of the number, as a tag of the version and as a metric of the run."""
    value: float
    """Value of the registered version."""
    base: float | None = None
    """Value of the base model on the same rows."""


class EvaluationStatus(ApiModel):
    """The evaluation of the registered version."""

    rows: NonNegative | None = None
    """Rows that were evaluated. It is absent with your own command."""
    digest: Annotated[str, Field(max_length=64)]
    """Numbers with the same digest are comparable. It covers the rows and the generation of answers; with your own command,
    the image, the command, its parameters and the data. Also the version's tag finetune_evaluation_data."""
    metrics: Annotated[
        list[EvaluatedMetric], Field(max_length=MAX_METRICS, json_schema_extra=list_type_map("name"))
    ] = Field(default_factory=list)
    """The numbers."""


class EvaluationResult(ApiModel):
    """The result of the evaluation pod."""

    rows: NonNegative
    digest: Name
    metrics: dict[MetricName, float]
    """The numbers of the registered version, by name."""
    base: dict[MetricName, float] = Field(default_factory=dict)
    """The numbers of the base model, by the same names."""

    @property
    def tracked_metrics(self) -> dict[str, float]:
        """The numbers of both models, by their names in trackers."""
        return {**self.metrics, **{f"{BASE_PREFIX}{name}": value for name, value in self.base.items()}}
