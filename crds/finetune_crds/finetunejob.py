"""The FineTuneJob resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    OPERATOR_DEFAULT,
    ApiModel,
    Rule,
    build_immutability_rule,
    join_names,
    replaced,
    rules,
)
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.data import Data
from finetune_crds.databricks import LOGIN_RULE, Databricks
from finetune_crds.distributed import Distributed
from finetune_crds.evaluation import EVALUATION_RULES, Evaluation
from finetune_crds.objective import OBJECTIVES_OF_COLUMNS, PAIR_OBJECTIVES, Objective
from finetune_crds.output import OUTPUT_RULES, Output
from finetune_crds.own_script import HAS_COMMAND, OWN_SCRIPT_RULES
from finetune_crds.pods import POD_RULES, Pods, build_moved_fields
from finetune_crds.prepare import Prepare
from finetune_crds.run_policy import RunPolicy
from finetune_crds.sinks import SINK_RULES
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.sweep import BEST_SUFFIX, SWEEP_RULES, Sweep
from finetune_crds.tracking import MLFLOW_RULES, Register, Tracking
from finetune_crds.trainer import Trainer
from finetune_crds.training import (
    LOW_RANK_METHODS,
    NEW_TOKENS_CONDITION,
    NEW_TOKENS_MESSAGE,
    SOFT_PROMPT_METHODS,
    Method,
    Model,
    ModelCache,
    Training,
)

# All fields are immutable except `suspend`, `runPolicy` and `pods`, which do not change what the job trains. Of the immutable
# fields, these have no default.
_IMMUTABLE_OPTIONAL = ("model", "data", "checkpoint", "register", "output", "evaluation", "sweep")
# These have a default. The API server fills in the default, so a rule need not check whether a job has the field.
_IMMUTABLE_WITH_DEFAULT = ("method", "objective", "training", "distributed", "trainer", "tracking")


def _build_objective_rule(columns_type: str, objectives: list[str]) -> Rule:
    """Return the rule that a type of columns requires certain objectives, and that these objectives require the type."""
    return Rule(
        "!has(self.data) || !has(self.data.columns) || "
        f"(self.objective.type in {objectives}) == (self.data.columns.type == '{columns_type}')",
        f"objective.type {join_names(objectives, 'or')} requires data.columns.type {columns_type}, which no other objective allows: for "
        "SFT and Distillation use Text, Messages or PromptResponse",
        ".data.columns.type",
    )


class FineTuneJobSpec(ApiModel):
    """The model, the data and the training of a job."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            build_immutability_rule(
                _IMMUTABLE_OPTIONAL,
                _IMMUTABLE_WITH_DEFAULT,
                message="only suspend, runPolicy and pods can change once the job exists: create a FineTuneJob with another name",
                ending="cannot change once the job exists (only suspend, runPolicy and pods can): create a FineTuneJob with another name",
            ),
            *(
                _build_objective_rule(columns_type, objectives)
                for columns_type, objectives in OBJECTIVES_OF_COLUMNS.items()
            ),
            *OWN_SCRIPT_RULES,
            *EVALUATION_RULES,
            *OUTPUT_RULES,
            *POD_RULES,
            *SWEEP_RULES,
            (
                f"self.objective.type == 'SFT' || !(self.method.type in {[*SOFT_PROMPT_METHODS]}) && "
                "(self.objective.type != 'Distillation' || self.method.type != 'QLoRA')",
                "method.type PrefixTuning and PromptTuning require objective.type SFT, and method.type QLoRA must not be combined with "
                "objective.type Distillation",
                ".method.type",
            ),
            (
                "!has(self.data) || !has(self.data.columns) || !has(self.data.columns.margin) || "
                "self.objective.type == 'RewardModel'",
                "data.columns.margin requires objective.type RewardModel",
                ".data.columns.margin",
            ),
            (
                f"!has(self.training.monitor) || self.training.monitor == 'Loss' || self.objective.type in {PAIR_OBJECTIVES}",
                f"training.monitor Accuracy requires objective.type {join_names(PAIR_OBJECTIVES, 'or')}",
                ".training.monitor",
            ),
            (
                "!(self.method.type in ['PrefixTuning', 'PromptTuning']) || (!self.training.packing && !self.training.compile && "
                "self.training.activationCheckpointing == 'None' && !has(self.training.neftuneAlpha))",
                "method.type PrefixTuning and PromptTuning require training.packing false, training.compile false, "
                "training.activationCheckpointing None and no training.neftuneAlpha",
            ),
            (
                "self.method.type == 'Full' || self.training.optimizer.type != 'Muon' && self.training.optimizer.weights == 'FP32'",
                "training.optimizer.type Muon and training.optimizer.weights BF16 require method.type Full",
                ".training.optimizer",
            ),
            (
                f"!has(self.model) || self.model.adapter != 'Continue' || self.method.type in {[*LOW_RANK_METHODS]} && "
                "!has(self.method.lora)",
                "model.adapter Continue requires method.type LoRA, QLoRA or DoRA, without method.lora: the adapter keeps its rank, scale "
                "and layers",
                ".model.adapter",
            ),
            (
                "!has(self.model) || !has(self.model.newTokens) || size(self.model.newTokens) == 0 || "
                f"{NEW_TOKENS_CONDITION}",
                NEW_TOKENS_MESSAGE,
                ".model.newTokens",
            ),
            *MLFLOW_RULES,
            *SINK_RULES,
            LOGIN_RULE,
            (
                f"!has(self.checkpoint) || !has(self.checkpoint.resumeFrom) || !{HAS_COMMAND}",
                "checkpoint.resumeFrom must not be set when trainer.command is set: name the folder of the checkpoints in "
                "trainer.args or trainer.parameters",
                ".checkpoint.resumeFrom",
            ),
            (
                "!has(self.data) || !has(self.data.prepare) || self.data.prepare.spark.mode != 'Databricks' || !has(self.model) || "
                "!self.model.base.startsWith('/') || self.model.base.startsWith('/Volumes/')",
                "model.base must not be a local path when data.prepare.spark.mode is Databricks: use a Hub id, a volume of "
                "Unity Catalog, or models:/ with tracking.uri databricks",
                ".model.base",
            ),
            Rule(
                "!has(self.data) || !has(self.data.prepare) || self.data.prepare.spark.mode != 'Databricks' || !has(self.model) || "
                "!self.model.base.matches('^(s3a?|gs|abfss)://')",
                "model.base must not be in an object store when data.prepare.spark.mode is Databricks: use a Hub id, or models:/ with "
                "tracking.uri databricks",
                ".model.base",
                at_creation=True,
            ),
            (
                "!has(self.objective.lossOn) || self.objective.lossOn == 'All' || !has(self.data) || "
                "has(self.data.prepare) && has(self.data.prepare.responseTemplate) || "
                "(!has(self.data.columns) || self.data.columns.type != 'Text') && "
                "(!has(self.data.prepare) || !has(self.data.prepare.promptTemplate))",
                "objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without "
                "data.prepare.promptTemplate, or data.prepare.responseTemplate",
                ".objective.lossOn",
            ),
            (
                "!has(self.objective.lossOn) || self.objective.lossOn != 'All' || !has(self.data) || "
                "(!has(self.data.columns) || !has(self.data.columns.messageWeight)) && "
                "(!has(self.data.source) || self.data.source.type != 'InferenceTable')",
                "objective.lossOn must not be All when data.columns.messageWeight is set, or when data.source.type is InferenceTable, "
                "whose earlier answers have no feedback",
                ".objective.lossOn",
            ),
        )
        | replaced(
            **build_moved_fields("env", "envFrom", "serviceAccountName", prefix="", settings="all"),
            **build_moved_fields("podTemplate", prefix="", settings="train", container="trainer"),
        )
    )

    model: Model | None = None
    """The model to start from; required without trainer.command."""
    data: Data | None = None
    """The examples; required without trainer.command."""
    method: Method = Field(default_factory=Method)
    """Training method: all parameters, or an adapter. Default: Full."""
    objective: Objective = Field(default_factory=Objective)
    """The loss of the training. Default: SFT."""
    training: Training = Field(default_factory=Training)
    """Hyperparameters."""
    distributed: Distributed = Field(default_factory=Distributed)
    """The training pods. Default: one pod with one rank."""
    trainer: Trainer = Field(default_factory=Trainer)
    """The program in the training pods. Default: the built-in loop."""
    pods: Annotated[Pods, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(default_factory=Pods)
    """Images, variables, ServiceAccounts and templates of the pods, which you can change while the job runs. A change
    applies to new pods."""
    checkpoint: Checkpoint | None = None
    """The checkpoints from which a restart resumes; without them, every attempt starts from the beginning."""
    tracking: Tracking = Field(default_factory=Tracking)
    """The MLflow run."""
    register_: Register | None = Field(default=None, alias="register")
    """The registered model; without it, MLflow only tracks the run."""
    output: Output | None = None
    """Folder of the model, in addition to the registry or instead of it."""
    evaluation: Evaluation | None = None
    """An evaluation of the registered version, before its aliases move. Without it, the version has only numbers of the
    training, such as the loss on the validation split."""
    sweep: Sweep | None = None
    """Train several times with different hyperparameters, and deliver the best model only."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """Restarts, deadlines, cleanup and the queue, which you can change while the job runs."""
    suspend: bool = False
    """True stops the pods and keeps the checkpoint; false resumes from it. You can change it while the job runs."""

    @property
    def prepare(self) -> Prepare | None:
        """The preparation; None if the job prepares no data."""
        return self.data.prepare if self.data else None

    @property
    def databricks(self) -> Databricks | None:
        """The Databricks run that prepares the data; None without one."""
        return self.prepare.spark.databricks if self.prepare else None

    @property
    def model_cache(self) -> ModelCache | None:
        """The cache of downloaded models; None without one."""
        return self.model.cache if self.model else None


class FineTuneJob(ApiModel):
    """Prepare a corpus on Spark, train on it with torchrun and FSDP, evaluate, and register the model."""

    PLURAL: ClassVar[str] = "finetunejobs"
    KIND: ClassVar[str] = "FineTuneJob"
    SHORT_NAMES: ClassVar[list[str]] = ["ftj"]
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason"},
        {"name": "Progress", "type": "string", "jsonPath": ".status.progress.summary"},
        {"name": "Loss", "type": "number", "jsonPath": ".status.progress.loss"},
        {"name": "Model", "type": "string", "jsonPath": ".status.model.summary"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Nodes", "type": "string", "jsonPath": ".status.nodes.summary", "priority": 1},
        {"name": "Device", "type": "string", "jsonPath": ".status.device.summary", "priority": 1},
        {"name": "Attempt", "type": "integer", "jsonPath": ".status.attempt", "priority": 1},
        {"name": "Eval", "type": "number", "jsonPath": ".status.progress.evalLoss", "priority": 1},
        {"name": "Tokens/s", "type": "number", "jsonPath": ".status.progress.tokensPerSecond", "priority": 1},
        {"name": "ETA", "type": "string", "jsonPath": ".status.progress.eta", "priority": 1},
        {"name": "Run", "type": "string", "jsonPath": ".status.mlflow.runId", "priority": 1},
        {
            "name": "Message",
            "type": "string",
            "jsonPath": ".status.conditions[?(@.type=='Ready')].message",
            "priority": 1,
        },
    ]
    # <name>-train-<attempt>-<index>-<suffix> must be a host name of at most 63 characters, which leaves 40 for the name.
    MAX_NAME: ClassVar[int] = 40
    # The longest name of a child of a sweep is `<name>-best`.
    MAX_SWEEP_NAME: ClassVar[int] = MAX_NAME - len(f"-{BEST_SUFFIX}")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('^[a-z][a-z0-9-]*$')",
                f"metadata.name must have at most {MAX_NAME} lowercase letters, digits and '-', and begin with a letter",
            ),
            (
                "!has(self.spec.checkpoint) || !has(self.spec.checkpoint.resumeFrom) || "
                "!has(self.spec.checkpoint.resumeFrom.name) || "
                "self.spec.checkpoint.resumeFrom.name != self.metadata.name",
                "checkpoint.resumeFrom.name must not be this job, which resumes from its own checkpoints anyway: for the "
                "checkpoints of a deleted job of this name, set type to Uri",
                ".spec.checkpoint.resumeFrom.name",
            ),
            (
                f"!has(self.spec.sweep) || size(self.metadata.name) <= {MAX_SWEEP_NAME}",
                f"metadata.name must have at most {MAX_SWEEP_NAME} characters when sweep is set, since the names of the trials begin with "
                "it",
                ".spec.sweep",
            ),
        )
    )

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneJob"] = "FineTuneJob"
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: FineTuneJobSpec
    """The model, the data and the training of the job."""
    status: FineTuneJobStatus = Field(default_factory=FineTuneJobStatus)
    """The state that the operator reports."""
