"""`spec.sweep`: train the job several times with different hyperparameters, and keep the best model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    LIST_TYPE_SET,
    OPERATOR_DEFAULT,
    ApiModel,
    NonNegative,
    Positive,
    Rule,
    join_names,
    list_type_map,
    rules,
)
from finetune_crds.objective import PAIR_OBJECTIVES
from finetune_crds.own_script import HAS_COMMAND
from finetune_crds.status_parts import Phase

MAX_TRIALS = 100
MAX_PARAMETERS = 8
MAX_RUNGS = 8
BEST_SUFFIX = "best"

FieldPath = Annotated[
    str,
    Field(max_length=128, pattern=r"^(training|method|objective|distributed)(\.[a-z][A-Za-z0-9]*)*$"),
]


class SweepRange(ApiModel):
    """An interval of numbers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.min < self.max", "min must be below max", ".min"),
            (
                "!has(self.scale) || self.scale != 'Log' || self.min > 0.0 && (!has(self.step) || self.step > 1.0)",
                "when scale is Log, min must be above 0, and step, which is a factor, above 1",
            ),
        )
    )

    min: float
    """Lowest value."""
    max: float
    """Highest value."""
    scale: Annotated[Literal["Linear", "Log"], Field(json_schema_extra=OPERATOR_DEFAULT)] = "Linear"
    """Draw values evenly (Linear), or their logarithms (Log), for example for learning rates."""
    step: Annotated[float, Field(gt=0)] | None = None
    """Only the values min, min + step, min + 2 step and so on up to max; required when algorithm is Grid. With scale
    Log: min, min x step, min x step x step and so on. Default: any value; for a field of whole numbers, every whole
    number."""


class SweepParameter(ApiModel):
    """A field whose value differs among the trials."""

    # Rules cannot tell whether `values` is set: CEL does not know lists of any JSON type.
    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["values"]}, {"required": ["range"]}]}
    )

    field: FieldPath
    """Path of a field or a part below spec, such as training.learningRate or method."""
    values: (
        Annotated[
            list[Any],
            Field(
                min_length=1,
                max_length=MAX_TRIALS,
                json_schema_extra={"items": {"x-kubernetes-preserve-unknown-fields": True}},
            ),
        ]
        | None
    ) = None
    """The values to choose from, of the type of the field, instead of range."""
    range: SweepRange | None = None
    """The interval to choose from."""


class Sweep(ApiModel):
    """Trials with different hyperparameters. Each trial is a FineTuneJob, NAME-1, NAME-2 and so on, which this job owns."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.parameters.all(a, self.parameters.exists_one(b, b.field == a.field || b.field.startsWith(a.field + '.')))",
                "the fields of parameters must differ, and no field may be part of another one",
                ".parameters",
            ),
            (
                "has(self.trials) == (self.algorithm != 'Grid') && has(self.rungs) == (self.algorithm == 'ASHA')",
                "trials is required unless algorithm is Grid, and rungs is required when algorithm is ASHA: set neither of them otherwise",
            ),
            (
                "self.algorithm != 'Grid' || self.parameters.all(item, !has(item.range) || has(item.range.step))",
                "each range requires a step when algorithm is Grid",
                ".parameters",
            ),
        )
    )

    parameters: Annotated[list[SweepParameter], Field(min_length=1, max_length=MAX_PARAMETERS)]
    """The fields that differ among the trials. Grid changes the last one fastest."""
    algorithm: Literal["Grid", "Random", "TPE", "ASHA"]
    """The combinations of values to try: all of them, at most 100 (Grid), random ones (Random and ASHA), or those that
    an estimator chooses from earlier results (TPE). TPE: the tree-structured Parzen estimator of Optuna. ASHA: each
    trial is suspended at a rung, and resumes if it is among the best third there."""
    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = None
    """Number of trials; required unless algorithm is Grid."""
    parallel: Annotated[int, Field(ge=1, le=MAX_TRIALS)] = 1
    """Maximum number of trials at a time."""
    rungs: (
        Annotated[list[Positive], Field(min_length=1, max_length=MAX_RUNGS, json_schema_extra=LIST_TYPE_SET)]
        | None
    ) = None
    """ASHA: the optimizer steps at which trials are compared, such as [100, 300, 900]; all before the last step."""
    metric: Literal["eval_loss", "eval_reward_accuracy"] = "eval_loss"
    """The metric of the validation split that compares trials: the lowest eval_loss is the best, or the highest
    eval_reward_accuracy. The latter is the share of pairs whose chosen answer is ranked higher."""
    seed: NonNegative = 42
    """Seed of the values that Random and TPE draw."""
    max_failed_trials: NonNegative = 3
    """Maximum number of failed trials; one more fails the job. The other trials then stop."""


class Rung(ApiModel):
    """A rung that a trial of ASHA has reached."""

    step: Positive
    """The step of the rung."""
    metric: float | None = None
    """Value of the metric at this step. Absent if it is not finite, or if the trial read other rows."""


class Trial(ApiModel):
    """A trial of a sweep."""

    n: Positive
    """Number of the trial. Its FineTuneJob is NAME-n."""
    parameters: dict[str, Annotated[str, Field(max_length=256)]]
    """Value of each field as JSON, by path."""
    metric: float | None = None
    """Value of the metric, once the trial has succeeded."""
    step: NonNegative | None = None
    """Optimizer steps done, once the trial has ended."""
    phase: Phase | None = None
    """Phase of the trial."""
    rungs: (
        Annotated[list[Rung], Field(max_length=MAX_RUNGS, json_schema_extra=list_type_map("step"))] | None
    ) = None
    """ASHA: the rungs that the trial has reached."""
    promotions: NonNegative | None = None
    """ASHA: number of rungs from which the trial was promoted."""


class SweepStatus(ApiModel):
    """The trials of spec.sweep."""

    best: Positive | None = None
    """Number of the best trial so far."""
    planned: NonNegative = 0
    """Number of trials of the sweep."""
    trials: Annotated[list[Trial], Field(max_length=MAX_TRIALS, json_schema_extra=list_type_map("n"))] = (
        Field(default_factory=list)
    )
    """The trials that have started, by number."""


# CEL on FineTuneJobSpec.
_HAS_SWEEP = "has(self.sweep)"
_NAMES_VERSION = "matches('@v[0-9]+$')"

SWEEP_RULES = (
    Rule(
        f"!{_HAS_SWEEP} || !{HAS_COMMAND}",
        "sweep must not be set when trainer.command is set: let your command "
        "try the values, for example with optuna",
        ".sweep",
    ),
    Rule(
        f"!{_HAS_SWEEP} || !has(self.checkpoint) || !has(self.checkpoint.resumeFrom)",
        "checkpoint.resumeFrom must not be set when sweep is set: a run continues only with its own hyperparameters",
        ".checkpoint.resumeFrom",
    ),
    Rule(
        f"!{_HAS_SWEEP} || self.sweep.metric == 'eval_loss' || self.objective.type in {PAIR_OBJECTIVES} && (!has(self.training.select) "
        "|| self.training.select == 'Last' || has(self.training.monitor) && self.training.monitor == 'Accuracy') && "
        "!self.sweep.parameters.exists(item, item.field in ['training', 'training.select', 'training.monitor', 'objective', 'objective.type'])",
        f"sweep.metric eval_reward_accuracy requires objective.type {join_names(PAIR_OBJECTIVES, 'or')}, and training.monitor Accuracy "
        "when training.select is Best; trials must not change these fields",
        ".sweep.metric",
    ),
    # NB: the newest version may be another one when the next trial starts.
    Rule(
        f"!{_HAS_SWEEP} || !has(self.data) || !has(self.data.splits) || (self.data.splits.type == 'Delta' ? has(self.data.splits.version) : "
        f"self.data.splits.type != 'Tables' || (!has(self.data.splits.train) || self.data.splits.train.{_NAMES_VERSION}) && (!has(self.data.splits.validation) || "
        f"self.data.splits.validation.{_NAMES_VERSION}))",
        "sweep requires a version of data.splits, so that all trials read the same rows: data.splits.version, or @v3 at the end of the names "
        "of tables",
        ".data.splits",
    ),
    # NB: `rungs` falls on evaluations, which a trial must not move.
    Rule(
        f"!{_HAS_SWEEP} || !has(self.sweep.rungs) || has(self.training) && has(self.training.evalEverySteps) && "
        "self.sweep.rungs.all(rung, rung % self.training.evalEverySteps == 0 && (!has(self.training.maxSteps) || rung < self.training.maxSteps)) "
        "&& !self.sweep.parameters.exists(item, item.field in ['training', 'training.evalEverySteps', 'training.maxSteps'])",
        "each of sweep.rungs must be a multiple of training.evalEverySteps and below training.maxSteps, which trials must not change",
        ".sweep.rungs",
    ),
)
"""Rules of FineTuneJobSpec."""
