"""The FineTuneJob resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    A_SET,
    LATE,
    ApiModel,
    LongText,
    Name,
    NonNegative,
    Positive,
    QueueName,
    Rule,
    Uri,
    immutable,
    join_names,
    replaced,
    rules,
)
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.code import Code, Dependencies
from finetune_crds.data import Data
from finetune_crds.databricks import IN_WORKSPACE, ON_DATABRICKS, stored_in_workspace
from finetune_crds.distributed import Distributed
from finetune_crds.env import LocalReference
from finetune_crds.evaluation import EVALUATION_RULES, Evaluation
from finetune_crds.mlflow_names import NOT_IN_UNITY_TAGS, UNITY_TAGS_MESSAGE, Alias, ModelName, Tags
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, OBJECTIVES_OF_COLUMNS, Objective
from finetune_crds.output import OUTPUT_RULES, Output
from finetune_crds.own_script import OWN_SCRIPT_RULES, Parameters
from finetune_crds.pods import POD_RULES, Pods, moved
from finetune_crds.prepare import Prepare
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.training import LOW_RANK, NEW_TOKENS_NEED, Method, Model, ModelCache, Training

PublicUrl = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^https?://")]
ExitCode = Annotated[int, Field(ge=1, le=255)]
ExitCodes = Annotated[list[ExitCode], Field(max_length=64, json_schema_extra=A_SET)]


class Trainer(ApiModel):
    """What runs in the training pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(has(self.command) && size(self.command) > 0) || (!has(self.code) && (!has(self.args) || size(self.args) == 0) && "
                "(!has(self.dependencies) || size(self.dependencies) == 0))",
                "args, code and dependencies need command, such as [torchrun, my_train.py]: the built-in loop takes none of them",
            ),
        )
        | replaced(**moved("image", "env", "envFrom", of="trainer.", to="train"))
    )

    command: Annotated[list[LongText], Field(max_length=64)] = Field(default_factory=list)
    """Your own command, run once in each pod, such as [torchrun, my_train.py]. Default: the built-in loop."""
    args: Annotated[list[LongText], Field(max_length=256)] = Field(default_factory=list)
    """Arguments of that command."""
    code: Code | None = None
    """Your own training script."""
    dependencies: Dependencies = Field(default_factory=list)
    """Packages of your command, as requirements of pip such as datasets>=3. Each pod installs what its image lacks."""
    parameters: Parameters = Field(default_factory=dict)
    """Parameters of that command, of any JSON type. It reads them from HYPERPARAMETERS_PATH, a YAML file with nothing else."""


def _on_databricks(then: str, message: str, field: str) -> tuple[str, str, str]:
    """A rule for jobs whose tracking is at Databricks."""
    return f"!{ON_DATABRICKS} || ({then})", message, field


class Tracking(ApiModel):
    """The MLflow run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.uri) || self.uri != 'databricks' || !has(self.registryUri) || "
                "self.registryUri == 'databricks-uc'",
                "models of runs in a Databricks workspace are in Unity Catalog: set registryUri to databricks-uc",
                ".registryUri",
            ),
            (
                "!has(self.registryUri) || self.registryUri != 'databricks-uc' || !has(self.uri) || "
                "self.uri == 'databricks'",
                "runs of models in Unity Catalog are in its workspace: set uri to databricks",
                ".uri",
            ),
        )
    )

    uri: Uri | None = None
    """MLflow tracking server, or databricks. Default: the server that the operator is installed with."""
    public_url: PublicUrl | None = None
    """Where a browser finds the server of uri, for status.links. Default: uri."""
    registry_uri: Uri | None = None
    """MLflow model registry, or databricks-uc. Default: the tracking server; Unity Catalog with uri databricks."""
    experiment: Name | None = None
    """Experiment; a path on Databricks. Default: the namespace of the job; on Databricks /Shared/namespace."""
    run_name: Name | None = None
    """Name of the run. Default: the name of the job."""
    tags: Tags = Field(default_factory=dict)
    """Tags of the run."""
    secret_ref: LocalReference | None = None
    """Secret with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; for Databricks with
    DATABRICKS_HOST and DATABRICKS_TOKEN, or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. The pods get it too, unless
    trainerSecretRef is set."""
    trainer_secret_ref: LocalReference | None = None
    """Secret that the pods get instead of that of secretRef. Its credentials need to write the run and to create a
    version, and no more. Default: the Secret of secretRef."""
    system_metrics: bool = False
    """Log CPU, memory and GPU metrics of each rank, every 10 s."""

    @property
    def secret_of_pods(self) -> LocalReference | None:
        """The Secret that the pods get."""
        return self.trainer_secret_ref or self.secret_ref


Upload = Literal["Proxy", "Direct"]


class Register(ApiModel):
    """The registered model."""

    model: ModelName = ""
    """Name of the registered model. Default: metadata.name."""
    aliases: Annotated[list[Alias], Field(max_length=10, json_schema_extra=A_SET)] = ["candidate"]
    """Aliases to point at the new version."""
    tags: Tags = Field(default_factory=dict)
    """Tags of the version."""
    signature: bool = True
    """Store the model's input and output signature with the version."""
    upload: Upload | None = None
    """How the files get to the store of the MLflow server. Proxy: through the server. Direct: large files straight to its object store, by
    addresses that the server signs; the pods need a way there. Default: Direct for files above 500 MiB where the server offers it."""


class RunPolicy(ApiModel):
    """What happens when a run fails, takes too long or ends."""

    max_restarts: NonNegative = 3
    """How often the whole gang restarts after a failure. Preemption and node loss do not count, nor do attempts that cannot begin
    because a server of code or packages does not answer or refuses the login (exit code 69)."""
    retryable_exit_codes: ExitCodes = Field(default_factory=list)
    """If set, only these exit codes cause a restart."""
    fatal_exit_codes: ExitCodes = [64, 65]
    """Exit codes that fail the job at once: 64 the recipe is wrong, 65 the data is wrong."""
    active_deadline_seconds: Positive | None = None
    """The job fails when preparation, training and evaluation take longer than this. Time in suspension does not count."""
    ttl_seconds_after_finished: NonNegative | None = None
    """Seconds from the end until the pods and other children are deleted. The FineTuneJob itself stays."""
    queue_name: QueueName | None = None
    """Kueue queue that admits the pods of training and evaluation; empty for none. Default: the queue of the installation, if it has one."""


# What cannot change: all but `suspend`, `runPolicy` and `pods`, which are about how a job runs and not about what it trains.
_OPTIONAL = ("model", "data", "checkpoint", "register", "output", "evaluation")
# The API server completes each of these, so every job has them.
_COMPLETED = ("method", "objective", "training", "distributed", "trainer", "tracking")


def _cannot_change(field: str) -> Rule:
    message = f"spec.{field} cannot change once the job exists (only suspend, runPolicy and pods can): create a FineTuneJob with another name"
    if field in _COMPLETED:
        return Rule(f"self.{field} == oldSelf.{field}", message, f".{field}")
    return immutable(field, message)


def _go_together(columns: str, objectives: list[str]) -> list[Rule]:
    """The rules that some objectives have columns of a type, and that no other objective has them."""
    objective_list = join_names(objectives, "or")
    return [
        Rule(
            f"!(self.objective.type in {objectives}) || !has(self.data) || !has(self.data.columns) || "
            f"self.data.columns.type == '{columns}'",
            f"objective {objective_list} needs data.columns of type {columns}",
            ".data.columns.type",
        ),
        Rule(
            f"!has(self.data) || !has(self.data.columns) || self.data.columns.type != '{columns}' || "
            f"self.objective.type in {objectives}",
            f"data.columns of type {columns} needs objective.type {objective_list}: for SFT and Distillation use Text, Messages or "
            "PromptResponse",
            ".data.columns.type",
        ),
    ]


class FineTuneJobSpec(ApiModel):
    """What to train, on what, and how."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(_cannot_change(field) for field in (*_OPTIONAL, *_COMPLETED)),
            *(rule for of in OBJECTIVES_OF_COLUMNS.items() for rule in _go_together(*of)),
            *OWN_SCRIPT_RULES,
            *EVALUATION_RULES,
            *OUTPUT_RULES,
            *POD_RULES,
            (
                "!(self.objective.type == 'Distillation' && self.method.type in "
                "['QLoRA', 'PrefixTuning', 'PromptTuning'])",
                "Distillation works with method Full, LoRA or DoRA",
                ".method.type",
            ),
            (
                f"!(self.objective.type in {[*COLUMNS_OF_OBJECTIVE]} && self.method.type in ['PrefixTuning', 'PromptTuning'])",
                f"objectives {', '.join(COLUMNS_OF_OBJECTIVE)} work with method Full, LoRA, QLoRA or DoRA",
                ".method.type",
            ),
            (
                "!has(self.training.neftuneAlpha) || !(self.method.type in ['PrefixTuning', 'PromptTuning'])",
                "training.neftuneAlpha works with method Full, LoRA, QLoRA or DoRA: the embeddings of virtual tokens get no noise",
                ".training.neftuneAlpha",
            ),
            (
                "!(self.method.type in ['PrefixTuning', 'PromptTuning']) || "
                "(!self.training.packing && !self.training.compile && self.training.activationCheckpointing == 'None')",
                "virtual tokens are lost under packing, compiled layers and activation checkpointing: set training.packing: false, "
                "training.compile: false and training.activationCheckpointing: None",
            ),
            (
                "self.method.type == 'Full' || self.training.optimizer.type != 'Muon'",
                "optimizer.type: Muon needs method Full: set AdamW or AdamW8bit",
                ".training.optimizer.type",
            ),
            (
                "self.method.type == 'Full' || self.training.optimizer.weights == 'FP32'",
                "optimizer.weights: BF16 needs method Full: adapters are small, and the base under them is not kept in fp32",
                ".training.optimizer.weights",
            ),
            (
                f"!has(self.model) || self.model.adapter != 'Continue' || self.method.type in {[*LOW_RANK]}",
                "model.adapter: Continue needs method LoRA, QLoRA or DoRA",
                ".model.adapter",
            ),
            (
                "!has(self.model) || self.model.adapter != 'Continue' || !has(self.method.lora)",
                "model.adapter: Continue keeps the rank, the scale and the layers of the adapter: remove method.lora",
                ".method.lora",
            ),
            *(
                (
                    f"!has(self.model) || !has(self.model.newTokens) || size(self.model.newTokens) == 0 || {condition}",
                    message,
                    ".model.newTokens",
                )
                for condition, message in NEW_TOKENS_NEED.items()
            ),
            _on_databricks(
                "!has(self.register) || (has(self.register.model) && "
                "self.register.model.matches('^[^./ ]+[.][^./ ]+[.][^./ ]+$'))",
                "a model in Unity Catalog has three names: write register.model as catalog.schema.name",
                ".register.model",
            ),
            _on_databricks(
                "!has(self.register) || !has(self.register.signature) || self.register.signature",
                "Unity Catalog needs the signature of a model: remove register.signature",
                ".register.signature",
            ),
            _on_databricks(
                "!has(self.register) || !has(self.register.tags) || "
                f"self.register.tags.all(key, !key.matches('{NOT_IN_UNITY_TAGS}'))",
                f"{UNITY_TAGS_MESSAGE}: rename it",
                ".register.tags",
            ),
            _on_databricks(
                "!has(self.register) || !has(self.register.upload)",
                "models of a Databricks workspace go straight to its store: remove register.upload",
                ".register.upload",
            ),
            _on_databricks(
                "!has(self.tracking.experiment) || self.tracking.experiment.startsWith('/')",
                "an experiment of a Databricks workspace is a path, such as /Shared/support",
                ".tracking.experiment",
            ),
            (
                "!has(self.data) || !has(self.data.prepare) || !has(self.data.prepare.output) || "
                f"!self.data.prepare.output.{IN_WORKSPACE}",
                "the training pods cannot read a folder of a Databricks workspace: use the object storage behind it",
                ".data.prepare.output",
            ),
            *stored_in_workspace("checkpoint.uri"),
            *stored_in_workspace("checkpoint.resumeFrom.uri"),
            (
                "!has(self.checkpoint) || !has(self.checkpoint.resumeFrom) || !has(self.trainer.command) || "
                "size(self.trainer.command) == 0",
                "checkpoint.resumeFrom needs the built-in loop: your command reads its own checkpoints, so name their folder in "
                "trainer.args or trainer.parameters",
                ".checkpoint.resumeFrom",
            ),
            (
                "!has(self.data) || !has(self.data.prepare) || self.data.prepare.spark.mode != 'Databricks' || !has(self.model) || "
                "!self.model.base.startsWith('/') || self.model.base.startsWith('/Volumes/')",
                "data.prepare.spark.mode Databricks reads the tokenizer of model.base, and this is a folder of the pods: use "
                "a Hub id, a volume of Unity Catalog, or models:/ with tracking.uri databricks",
                ".model.base",
            ),
            Rule(
                "!has(self.data) || !has(self.data.prepare) || self.data.prepare.spark.mode != 'Databricks' || !has(self.model) || "
                "!self.model.base.matches('^(s3a?|gs|abfss)://')",
                "data.prepare.spark.mode Databricks reads the tokenizer of model.base, and the run has no credentials for "
                "this store: use a Hub id, or models:/ with tracking.uri databricks",
                ".model.base",
                at_creation=True,
            ),
            (
                "!has(self.objective.lossOn) || self.objective.lossOn == 'All' || !has(self.data) || "
                "!has(self.data.prepare) || !has(self.data.prepare.promptTemplate) || "
                "has(self.data.prepare.responseTemplate)",
                "objective.lossOn Answer and LastAnswer with data.prepare.promptTemplate need responseTemplate: with promptTemplate "
                "alone, prompt and answer are one text",
            ),
            (
                "!has(self.objective.lossOn) || self.objective.lossOn == 'All' || !has(self.data) || "
                "!has(self.data.columns) || self.data.columns.type != 'Text' || "
                "(has(self.data.prepare) && has(self.data.prepare.responseTemplate))",
                "objective.lossOn Answer and LastAnswer need data.columns of type PromptResponse or Messages: a text has no answer",
                ".objective.lossOn",
            ),
            (
                "!has(self.objective.lossOn) || self.objective.lossOn != 'All' || !has(self.data) || !has(self.data.columns) || "
                "!has(self.data.columns.messageWeight)",
                "data.columns.messageWeight says which answers the loss is on, and objective.lossOn All takes it on every token: "
                "remove one of them",
                ".objective.lossOn",
            ),
        )
        | replaced(
            **moved("env", "envFrom", "serviceAccountName", of="", to="all"),
            **moved("podTemplate", of="", to="train", container="trainer"),
        )
    )

    model: Model | None = None
    """The model to start from. Required without trainer.command."""
    data: Data | None = None
    """The examples. Required without trainer.command."""
    method: Method = Field(default_factory=Method)
    """Which parameters are trained. Default: Full."""
    objective: Objective = Field(default_factory=Objective)
    """What the loss is. Default: SFT."""
    training: Training = Field(default_factory=Training)
    """Hyperparameters."""
    distributed: Distributed = Field(default_factory=Distributed)
    """The gang of pods. Default: one pod with one rank."""
    trainer: Trainer = Field(default_factory=Trainer)
    """What runs in the training pods. Default: the built-in loop."""
    pods: Annotated[Pods, Field(json_schema_extra=LATE)] = Field(default_factory=Pods)
    """Images, variables, accounts and templates of the pods. You can change it while the job runs: a change takes effect with the
    next pod."""
    checkpoint: Checkpoint | None = None
    """Where a restart resumes from. Without it, every attempt starts from the beginning."""
    tracking: Tracking = Field(default_factory=Tracking)
    """The MLflow run."""
    register_: Register | None = Field(default=None, alias="register")
    """The registered model. Without it, the run is tracked and nothing is registered."""
    output: Output | None = None
    """The folder of the model, besides the registry or in place of it."""
    evaluation: Evaluation | None = None
    """An evaluation of the registered version, before its aliases move. Without it, the version has the numbers of the training:
    its loss on the validation split."""
    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """What happens when a run fails, takes too long or ends. You can change it while the job runs."""
    suspend: bool = False
    """True stops the pods and keeps the checkpoint; false resumes from it. You can change it while the job runs."""

    @property
    def prepare(self) -> Prepare | None:
        """The preparation; None where nothing is prepared."""
        return self.data.prepare if self.data else None

    @property
    def model_cache(self) -> ModelCache | None:
        """The claim with downloaded models; None without one."""
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
    # <name>-train-<attempt>-<index>-<suffix> must be a host name: 63 characters.
    MAX_NAME: ClassVar[int] = 40

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('^[a-z][a-z0-9-]*$')",
                f"metadata.name becomes part of host names: at most {MAX_NAME} characters, a letter first, no dots",
            ),
            (
                "!has(self.spec.checkpoint) || !has(self.spec.checkpoint.resumeFrom) || "
                "!has(self.spec.checkpoint.resumeFrom.name) || "
                "self.spec.checkpoint.resumeFrom.name != self.metadata.name",
                "checkpoint.resumeFrom names this job: a restart resumes from its own checkpoints anyway. For those of a deleted job "
                "of this name, set type: Uri",
                ".spec.checkpoint.resumeFrom.name",
            ),
        )
    )

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneJob"] = "FineTuneJob"
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: FineTuneJobSpec
    """What to train, on what, and how."""
    status: FineTuneJobStatus = Field(default_factory=FineTuneJobStatus)
    """What the operator reports."""
