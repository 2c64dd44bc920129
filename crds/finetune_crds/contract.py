"""The contract between the operator and the pods it makes: exit codes, names, and the termination message."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, Uri
from finetune_crds.cleaning import RedactKind
from finetune_crds.data import Columns
from finetune_crds.env import CODE_ENV, EVALUATION_ENV
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.status import SplitCounts
from finetune_crds.status_parts import Commit, Digest, EvaluationSets, Recomputation, SourceRows, StepName

# Exit codes of a pod. Anything else may be retried.
EXIT_OK = 0
EXIT_RECIPE = 64
EXIT_DATA = 65
# Of the init containers of a command of your own alone: a server did not answer, or refused the login. Such an attempt does not
# count against runPolicy.maxRestarts.
EXIT_UNAVAILABLE = 69
EXIT_PREEMPTED = 75

RECIPE_DIRECTORY = "/etc/finetune"
RECIPE_FILE = "recipe.yaml"
RECIPE_VOLUME = "recipe"
RECIPE_PATH = f"{RECIPE_DIRECTORY}/{RECIPE_FILE}"
ENV_RECIPE = "FINETUNE_RECIPE"
# The number of the attempt, from 1, in each training pod of the operator and nowhere else.
ENV_ATTEMPT = "FINETUNE_ATTEMPT"
# Of a command of your own: its parameters beside the recipe, and the folder of its code.
PARAMETERS_FILE = "parameters.yaml"
PARAMETERS_PATH = f"{RECIPE_DIRECTORY}/{PARAMETERS_FILE}"
ENV_PARAMETERS = "HYPERPARAMETERS_PATH"
ENV_CODE = CODE_ENV
TERMINATION_PATH = "/dev/termination-log"
# A preparation whose executors are pods: the file that the driver writes their template to, their container, the command of the
# image that is an executor, and the ports of driver and executors.
EXECUTOR_TEMPLATE_FILE = "executor.yaml"
EXECUTOR_CONTAINER = "executor"
EXECUTOR_COMMAND = "finetune-executor"
# The driver of a SparkApplication: the command of the image that becomes it, the file that it runs, the version of Spark in the
# image, and the names that spark-submit gives the containers.
DRIVER_COMMAND = "finetune-driver"
DRIVER_FILE = "/opt/finetune/prep.py"
SPARK_VERSION = "4.2.0"
APPLICATION_DRIVER_CONTAINER = "spark-kubernetes-driver"
APPLICATION_EXECUTOR_CONTAINER = "spark-kubernetes-executor"
SPARK_DRIVER_PORT = 7078
SPARK_BLOCKS_PORT = 7079
# Variables of its driver: the pod, the namespace, the host name at which executors find it, their labels, and their pod template as
# JSON. NB: the template is a variable since it may hold secrets, which stay in the spec of a pod.
ENV_POD_NAME = "FINETUNE_POD_NAME"
ENV_POD_NAMESPACE = "FINETUNE_POD_NAMESPACE"
ENV_DRIVER_HOST = "FINETUNE_DRIVER_HOST"
ENV_EXECUTOR_SELECTOR = "FINETUNE_EXECUTOR_SELECTOR"
ENV_EXECUTOR_TEMPLATE = "FINETUNE_EXECUTOR_TEMPLATE"
# A preparation on Databricks: the distribution and the entry point of its wheel, its parameters, and the files that it reads
# and writes in the folder of the run.
PREP_WHEEL = "finetune-prep"
PREP_WHEEL_ENTRY = "finetune-prep-databricks"
PARAMETER_FOLDER = "--folder"
PARAMETER_MLFLOW_RUN = "--mlflow-run"
PROGRESS_FILE = "progress.txt"
REPORT_FILE = "report.json"
# The evaluation of a registered version: its command, its option with the version, and, for a command of your own, the folder
# of the model, the file of the numbers, and the volume of the folder.
EVALUATE_COMMAND = "finetune-evaluate"
EVALUATE_MODEL = "--model"
EVALUATE_FETCH = "--fetch"
ENV_MODEL_PATH, ENV_METRICS_PATH = EVALUATION_ENV
MODEL_PATH = "/var/run/finetune/model"
MODEL_VOLUME = "evaluated-model"
# The code and the packages of a command of your own: the command of the trainer's image that fetches a commit, the variables with
# its login, the script that installs packages with the Python of any image, beside the recipe, and where they are installed.
CHECKOUT_COMMAND = "finetune-checkout"
ENV_GIT_USERNAME, ENV_GIT_PASSWORD = "FINETUNE_GIT_USERNAME", "FINETUNE_GIT_PASSWORD"
CODE_VOLUME = "finetune-code"
DEPENDENCIES_VOLUME = "finetune-dependencies"
DEPENDENCIES_PATH = "/var/run/finetune/dependencies"
DEPENDENCIES_FILE = "dependencies.py"
# Reasons of their errors.
CHECKOUT_FAILED = "CheckoutFailed"
DEPENDENCIES_FAILED = "DependenciesFailed"
# Where the claim of model.cache is mounted, in the training pods and in the prep pod.
MODEL_CACHE_PATH = "/var/cache/finetune"
# The folder in it that is a cache of the Hugging Face Hub's client.
MODEL_CACHE_HUB = "hub"
# Kubernetes keeps this much of a termination message.
TERMINATION_MAX_BYTES = 4096
_CHECKPOINT = re.compile(r"(.+)/step-(\d{8})")

# Metrics of the MLflow run; the trainer logs them, the operator reads them into status.progress.
METRIC_STEP = "step"
METRIC_MAX_STEPS = "max_steps"
METRIC_LOSS = "loss"
METRIC_EVAL_LOSS = "eval_loss"
# Names of losses in the order in which they count: the built-in loop's and those of HF's Trainer, then Lightning's.
LOSSES = (
    METRIC_LOSS,
    "train/loss",
    "train_loss",
    "train_loss_step",
    "train_loss_epoch",
    "train/loss_step",
    "train/loss_epoch",
)
EVAL_LOSSES = (METRIC_EVAL_LOSS, "eval/loss", "val_loss", "val/loss", "validation_loss")
PARAM_MAX_STEPS = "max_steps"  # HF's Trainer logs its arguments, among them this one; -1 where epochs count
METRIC_EVAL_PERPLEXITY = "eval_perplexity"
METRIC_BASE_EVAL_LOSS = "base_eval_loss"
METRIC_FINAL_EVAL_LOSS = "final_eval_loss"
METRIC_FINAL_EVAL_PERPLEXITY = "final_eval_perplexity"
METRIC_LEARNING_RATE = "learning_rate"
METRIC_GRAD_NORM = "grad_norm"
METRIC_SKIPPED_STEPS = "skipped_steps"  # their gradients were not finite
METRIC_LOSS_SCALE = "loss_scale"  # precision FP16
METRIC_TOKENS_PER_SECOND = "tokens_per_second"
METRIC_SECONDS_REMAINING = "seconds_remaining"
METRIC_CHECKPOINT_STEP = "checkpoint_step"
METRIC_GOODPUT = "goodput"
METRIC_MFU = "mfu"  # model FLOPs utilization, where the chip's peak is known
METRIC_MEMORY = "memory_bytes"  # peak memory of a rank
METRIC_PLAN_MEMORY = "plan_memory_bytes"  # the same, as estimated before the weights are loaded
METRIC_DATA_WAIT = "data_wait_seconds"
METRIC_CHECKPOINT_SECONDS = "checkpoint_seconds"  # seconds that steps were blocked by checkpoints
METRIC_REWARD_MARGIN = "reward_margin"  # DPO, ORPO, SimPO; KTO: of the two means below
METRIC_REWARD_ACCURACY = "reward_accuracy"  # DPO, ORPO, SimPO
METRIC_REWARD_DESIRABLE = "reward_desirable"  # KTO: mean over the good answers
METRIC_REWARD_UNDESIRABLE = "reward_undesirable"  # KTO: mean over the bad answers
METRIC_KL = "kl"  # KTO: the estimate of the divergence from the reference

# Tags of the MLflow run and of the registered version. Those of versions have no dot, hyphen or slash in their names: Unity
# Catalog allows none of . , - = / : in the key of a tag.
TAG_JOB_UID = "finetune.dev/uid"  # operator, when it makes the run: how it finds the run again
TAG_JOB = "finetune.dev/job"  # operator: namespace/name
TAG_NAMESPACE_UID = "finetune.dev/namespace-uid"  # operator: uid of the namespace of the job
TAG_ATTEMPT = "finetune.dev/attempt"  # trainer, on the run: the newest attempt
TAG_PREPARATION = (
    "finetune.dev/preparation"  # prep pod, on the run: the step and its percent, such as writing 40%
)
ARTIFACTS_EVALUATION = "evaluation"  # evaluation pod, on the run: folder of the table generations.json
ARTIFACTS_PREPARATION = "preparation"  # prep pod, on the run: folder of the report, with report.html
# operator, when it makes the run, for trainer.code.git: MLflow's own names
TAG_GIT_COMMIT = "mlflow.source.git.commit"
TAG_GIT_BRANCH = "mlflow.source.git.branch"
TAG_GIT_URL = "mlflow.source.git.repoURL"
TAG_DEVICE = "finetune.dev/device"  # trainer, on the run: GPU or CPU
TAG_DEVICE_NAME = "finetune.dev/device-name"  # trainer, on the run: which one, such as NVIDIA H100 80GB HBM3
TAG_PLAN = "finetune.dev/plan"  # trainer, on the run: MemoryPlan of the newest attempt, as JSON
TAG_RECIPE = "finetune_recipe"  # trainer: digest of the recipe
TAG_DATA_PATH = "finetune_data_path"  # trainer: the table with the splits
TAG_DATA_VERSION = "finetune_data_version"  # trainer: its version
TAG_DATA_DIGEST = "finetune_data_digest"  # trainer: digest of its rows, see status.data.digest
TAG_SOURCE = "finetune_source"  # trainer: what was prepared; the sources of a mix one after the other
TAG_SOURCE_VERSION = "finetune_source_version"  # trainer: its version or commit, if it has one
TAG_DATA_ROWS = "finetune_data_rows"  # trainer, on the run: rows of each split, as JSON
TAG_DATA_TOKENS = "finetune_data_tokens"  # trainer, on the run: tokens of each split, as JSON
TAG_DATA_DROPPED = "finetune_data_dropped"  # trainer, on the run: rows that each step dropped, as JSON
# trainer, on the run and on the version: what a loss of evaluation is comparable on. Digest of the tokenized validation
# split, independent of the order of its examples; for any other objective than SFT also of that and of its reference or
# teacher
TAG_EVAL_DATA = "finetune_eval_data"
# operator, on the version: what the numbers of spec.evaluation are comparable on, see status.evaluation.digest
TAG_EVALUATION_DATA = "finetune_evaluation_data"
# trainer, on the run: why the newest checkpoint could not be written; empty when it could
TAG_CHECKPOINT_ERROR = "finetune.dev/checkpoint-error"
TAG_RESUMED_FROM = "finetune_resumed_from"  # trainer: the checkpoint of another job that the run began with
TAG_EVAL_LOSS = "eval_loss"  # trainer, on the version
TAG_PERPLEXITY = "perplexity"  # trainer, on the version
# Numbers of the training, which say how a version does on the validation split. No evaluation writes them.
TRAINING_METRICS = frozenset(
    {
        METRIC_STEP,
        METRIC_MAX_STEPS,
        METRIC_LOSS,
        METRIC_EVAL_PERPLEXITY,
        METRIC_BASE_EVAL_LOSS,
        METRIC_FINAL_EVAL_LOSS,
        METRIC_FINAL_EVAL_PERPLEXITY,
        METRIC_LEARNING_RATE,
        METRIC_GRAD_NORM,
        METRIC_SKIPPED_STEPS,
        METRIC_LOSS_SCALE,
        METRIC_TOKENS_PER_SECOND,
        METRIC_SECONDS_REMAINING,
        METRIC_CHECKPOINT_STEP,
        METRIC_GOODPUT,
        METRIC_MFU,
        METRIC_MEMORY,
        METRIC_PLAN_MEMORY,
        METRIC_DATA_WAIT,
        METRIC_CHECKPOINT_SECONDS,
        METRIC_REWARD_MARGIN,
        METRIC_REWARD_ACCURACY,
        METRIC_REWARD_DESIRABLE,
        METRIC_REWARD_UNDESIRABLE,
        METRIC_KL,
        TAG_EVAL_LOSS,
        TAG_PERPLEXITY,
    }
)


class PodError(ApiModel):
    """Why a pod failed."""

    reason: Annotated[str, Field(max_length=64)]
    """One CamelCase word, such as MissingColumn."""
    message: Annotated[str, Field(max_length=2048)]
    """One sentence: what happened and what to do."""
    rank: NonNegative | None = None
    """Global rank that failed first in this pod, where known."""


class PrepResult(ApiModel):
    """What the prep pod wrote."""

    rows: SplitCounts
    tokens: SplitCounts
    path: Uri
    version: NonNegative
    source_version: NonNegative | None = None
    source_revision: Commit | None = None
    sources: list[SourceRows] | None = None
    dropped: dict[StepName, NonNegative] = Field(default_factory=dict)
    """Examples that each step dropped, by step."""
    redacted: dict[RedactKind, NonNegative] | None = None
    """Values that were replaced by placeholders, by kind; None where nothing was to be."""
    warnings: list[str] | None = None
    """What the author should look at, a sentence each; None where there is nothing."""
    evaluation_sets: EvaluationSets | None = None
    columns: Columns | None = None
    """The source's columns that hold an example: those of the recipe, or those that were found."""
    digest: Digest | None = None
    """Digest of the preparation and of what it read."""
    written_by: Name | None = None
    """The FineTuneJob that wrote the version, where this one uses it; None for a version of its own."""


_INFORMATIONAL_FIELDS = ("evaluation_sets", "sources", "redacted", "dropped", "warnings")
"""Fields of PrepResult that a message does without, in this order."""


class TrainResult(ApiModel):
    """What rank 0 reports at the end."""

    step: NonNegative
    base_eval_loss: float | None = None
    eval_loss: float | None = None
    perplexity: float | None = None
    model_name: str | None = None
    model_version: str | None = None
    goodput: float | None = None


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class MemoryPlan(ApiModel):
    """What the built-in trainer plans before it loads the weights: the tag TAG_PLAN."""

    activation_checkpointing: Recomputation
    memory_bytes: _Count
    """Peak of a rank, as estimated."""
    limit_bytes: _Count | None = None
    """What a rank may use; None where that is unknown."""
    staged_bytes: _Count = 0
    """Of the host, for the copy of a rank from which asynchronous checkpoints are written."""
    parameters: _Count
    trained_parameters: _Count
    four_bit_parameters: _Count | None = None
    """Those of a QLoRA that are packed into four bits; None with another method."""
    parts: dict[str, _Count] = Field(default_factory=dict)
    """Bytes of the peak by what they are for."""

    @classmethod
    def parse(cls, text: str) -> MemoryPlan | None:
        """The plan in a tag, or None when it is something else."""
        try:
            return cls.model_validate_json(text)
        except ValueError:
            return None


class TerminationMessage(ApiModel):
    """The termination message of a pod, as JSON: a result or an error."""

    prep: PrepResult | None = None
    train: TrainResult | None = None
    evaluation: EvaluationResult | None = None
    error: PodError | None = None
    checkpoint_step: NonNegative | None = None
    """Step of the newest complete checkpoint, also when the pod was preempted."""

    def dump(self) -> str:
        """The message as text that fits into the limit of Kubernetes.

        What only informs is left out of a result that is too long; the message of an error is cut.
        """
        text = self.model_dump_json(by_alias=True, exclude_none=True)
        if len(text.encode()) <= TERMINATION_MAX_BYTES:
            return text
        if self.prep is not None:
            field = next((name for name in _INFORMATIONAL_FIELDS if getattr(self.prep, name)), None)
            if field is not None:
                prep = self.prep.model_copy(
                    update={field: PrepResult.model_fields[field].get_default(call_default_factory=True)}
                )
                return self.model_copy(update={"prep": prep}).dump()
        if self.error is None or not self.error.message:
            return text
        # NB: a character takes up to six bytes of JSON.
        shorter = self.error.message[: len(self.error.message) * 3 // 4]
        error = self.error.model_copy(update={"message": shorter})
        return self.model_copy(update={"error": error}).dump()

    @classmethod
    def parse(cls, text: str | None) -> TerminationMessage | None:
        """The message in `text`, or None when it is something else (the end of a log)."""
        try:
            message = cls.model_validate_json(text or "")
        except ValueError:
            return None
        return message if message.model_fields_set else None


class RunReport(ApiModel):
    """What a preparation on Databricks leaves in the volume: what a pod leaves by its exit code and its termination message."""

    exit_code: NonNegative
    message: TerminationMessage = Field(default_factory=TerminationMessage)

    @classmethod
    def parse(cls, text: bytes) -> RunReport | None:
        """The report in a file, or None when it is something else, such as half of one."""
        try:
            return cls.model_validate_json(text)
        except ValueError:
            return None


def checkpoint_folder(uri: str, *, namespace: str, name: str, uid: str) -> str:
    """The folder of one job's checkpoints: a job of the same name that comes later gets another."""
    return f"{uri.rstrip('/')}/{namespace}-{name}-{uid[:8]}"


def split_checkpoint_uri(uri: str) -> tuple[str, int | None]:
    """The folder of a job's checkpoints that a URI names, and the step where it names one of them."""
    match = _CHECKPOINT.fullmatch(uri.rstrip("/"))
    return (match[1], int(match[2])) if match else (uri.rstrip("/"), None)


def checkpoint_uri(folder: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return f"{folder}/step-{step:08d}"
