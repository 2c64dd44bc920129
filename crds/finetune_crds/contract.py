"""The contract between the operator and its pods: exit codes, names, and the termination message."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, Uri
from finetune_crds.cleaning import RedactKind
from finetune_crds.data import Columns
from finetune_crds.env import CODE_ENV, EVALUATION_ENV, GATE_ENV
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.status import SplitCounts
from finetune_crds.status_parts import Commit, Digest, EvaluationSets, Recomputation, SourceRows, StepName

# Exit codes of a pod. EXIT_RECIPE and EXIT_DATA end the job, unless runPolicy says otherwise; any other error may be retried.
EXIT_OK = 0
EXIT_RECIPE = 64
EXIT_DATA = 65
# Only for init containers of a job with your own command: a server did not answer, or refused the login of a Secret, which can be
# corrected. An attempt whose init container ends so does not count against runPolicy.maxRestarts.
EXIT_UNAVAILABLE = 69
EXIT_PREEMPTED = 75  # the pod was stopped from outside, by SIGTERM

RECIPE_DIRECTORY = "/etc/finetune"
RECIPE_FILE = "recipe.yaml"
RECIPE_VOLUME = "recipe"
RECIPE_PATH = f"{RECIPE_DIRECTORY}/{RECIPE_FILE}"
ENV_RECIPE = "FINETUNE_RECIPE"
# The number of the attempt, from 1. Only training pods of the operator have this variable.
ENV_ATTEMPT = "FINETUNE_ATTEMPT"
# Your own command.
PARAMETERS_FILE = "parameters.yaml"  # its parameters, in the recipe's folder
PARAMETERS_PATH = f"{RECIPE_DIRECTORY}/{PARAMETERS_FILE}"
ENV_PARAMETERS = "HYPERPARAMETERS_PATH"  # the variable with the path of the parameters
ENV_CODE = CODE_ENV  # the variable with the folder of the code
TERMINATION_PATH = "/dev/termination-log"
# A preparation with executor pods.
EXECUTOR_TEMPLATE_FILE = "executor.yaml"  # the executors' pod template, which the driver writes
EXECUTOR_CONTAINER = "executor"
EXECUTOR_COMMAND = "finetune-executor"  # the image's command that starts an executor
# A SparkApplication.
DRIVER_COMMAND = "finetune-driver"  # the image's command that starts the driver
DRIVER_FILE = "/opt/finetune/prep.py"  # the file that the driver runs
SPARK_VERSION = "4.2.0"  # in the image
APPLICATION_DRIVER_CONTAINER = "spark-kubernetes-driver"  # the name that spark-submit uses
APPLICATION_EXECUTOR_CONTAINER = "spark-kubernetes-executor"  # the name that spark-submit uses
SPARK_DRIVER_PORT = 7078
SPARK_BLOCKS_PORT = 7079  # the block managers of the driver and the executors
# Variables of a driver.
ENV_POD_NAME = "FINETUNE_POD_NAME"
ENV_POD_NAMESPACE = "FINETUNE_POD_NAMESPACE"
ENV_DRIVER_HOST = "FINETUNE_DRIVER_HOST"  # the driver's host name for the executors
ENV_EXECUTOR_SELECTOR = "FINETUNE_EXECUTOR_SELECTOR"  # the labels of the executors
# The executors' pod template as JSON. NB: the template can contain secrets, so it is passed in the spec of the pod, not in a ConfigMap.
ENV_EXECUTOR_TEMPLATE = "FINETUNE_EXECUTOR_TEMPLATE"
# A preparation on Databricks.
PREP_WHEEL = "finetune-prep"
PREP_WHEEL_ENTRY = "finetune-prep-databricks"  # the entry point of the wheel
PARAMETER_FOLDER = "--folder"  # the run's parameter with its folder in the volume
PARAMETER_MLFLOW_RUN = "--mlflow-run"  # the run's parameter with the id of the MLflow run
PROGRESS_FILE = "progress.txt"  # the run writes it to its folder
REPORT_FILE = "report.json"  # a RunReport, which the run writes to its folder
# The evaluation of a registered version.
EVALUATE_COMMAND = "finetune-evaluate"
EVALUATE_MODEL = "--model"  # the option with the address of the model
EVALUATE_FETCH = "--fetch"  # the option that only downloads the model
# Your own command of an evaluation: the variables with the folder of the model and with the file for the metrics.
ENV_MODEL_PATH, ENV_METRICS_PATH = EVALUATION_ENV
MODEL_PATH = "/var/run/finetune/model"  # the folder of the model
MODEL_VOLUME = "evaluated-model"
# The Job of a gate: the variables with the version.
ENV_MODEL_URI, ENV_MODEL_NAME, ENV_MODEL_VERSION = GATE_ENV[:3]
# The Job that copies a version from another registry: an init container that downloads, and a container that uploads.
COPY_COMMAND = "finetune-copy"
COPY_FROM = "--from"  # the option with the version of the source, models:/name/version
COPY_TO = "--to"  # the option with the model of the copy
COPY_ADDRESS = "--source"  # the option with the address of the source
COPY_DIGEST = "--digest"  # the option with the value of the tag TAG_COPY
COPY_PATH = "/var/run/finetune/copy"  # the folder that both containers share
COPY_VOLUME = "copied-model"
# The code and the packages of your own command.
CHECKOUT_COMMAND = "finetune-checkout"  # the command of the trainer image that fetches a commit
ENV_GIT_USERNAME, ENV_GIT_PASSWORD = "FINETUNE_GIT_USERNAME", "FINETUNE_GIT_PASSWORD"
CODE_VOLUME = "finetune-code"
DEPENDENCIES_VOLUME = "finetune-dependencies"
DEPENDENCIES_PATH = "/var/run/finetune/dependencies"
# The script in the recipe's folder that installs packages with the Python of any image.
DEPENDENCIES_FILE = "dependencies.py"
# The upload of output.from: the folder in which the command's container and the container of the upload tell each other their states,
# and the script in the recipe's folder that runs the command.
UPLOAD_COMMAND = "finetune-upload"
UPLOAD_VOLUME = "finetune-upload"
UPLOAD_PATH = "/var/run/finetune/upload"
OUTPUT_VOLUME = "finetune-output"
OUTPUT_FILE = "output.py"
# The files in UPLOAD_PATH. By the container of the upload: output.uri belongs to this attempt; the upload is complete; or a
# RunReport of its failure. By the container of the command: the command has ended with 0.
UPLOAD_CLAIMED, UPLOAD_DONE, UPLOAD_FAILED, UPLOAD_REQUESTED = "claimed", "done", "failed", "requested"
CHECKOUT_FAILED = "CheckoutFailed"  # the reason of an error of the checkout
DEPENDENCIES_FAILED = "DependenciesFailed"  # the reason of an error of the installation
# Mount path of the claim of model.cache, in the training pods and in the prep pod.
MODEL_CACHE_PATH = "/var/cache/finetune"
# Folder in the claim with the cache of the Hugging Face Hub's client.
MODEL_CACHE_HUB = "hub"
# Kubernetes truncates longer termination messages.
TERMINATION_MAX_BYTES = 4096
_CHECKPOINT = re.compile(r"(.+)/step-(\d{8})")

# Metrics of the MLflow run; the trainer logs them, the operator reads them into status.progress.
METRIC_STEP = "step"
METRIC_MAX_STEPS = "max_steps"
METRIC_LOSS = "loss"
METRIC_EVAL_LOSS = "eval_loss"
# Names of the loss, by priority: the built-in loop and HF's Trainer first, then Lightning.
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
PARAM_MAX_STEPS = (
    "max_steps"  # HF's Trainer logs its arguments, including this one; -1 if epochs limit the training
)
METRIC_EVAL_PERPLEXITY = "eval_perplexity"
METRIC_BASE_EVAL_LOSS = "base_eval_loss"
METRIC_FINAL_EVAL_LOSS = "final_eval_loss"
METRIC_FINAL_EVAL_PERPLEXITY = "final_eval_perplexity"
METRIC_LEARNING_RATE = "learning_rate"
METRIC_GRAD_NORM = "grad_norm"
METRIC_SKIPPED_STEPS = "skipped_steps"  # steps with infinite or NaN gradients
METRIC_LOSS_SCALE = "loss_scale"  # with precision FP16
METRIC_TOKENS_PER_SECOND = "tokens_per_second"
METRIC_SECONDS_REMAINING = "seconds_remaining"
METRIC_CHECKPOINT_STEP = "checkpoint_step"
METRIC_GOODPUT = "goodput"
METRIC_PRODUCTIVE_SECONDS = "productive_seconds"  # seconds of all attempts in steps whose result is kept
METRIC_MFU = "mfu"  # model FLOPs utilization, if the peak of the chip is known
METRIC_MEMORY = "memory_bytes"  # peak memory of a rank
METRIC_PLAN_MEMORY = "plan_memory_bytes"  # estimated peak memory of a rank, before the weights are loaded
METRIC_DATA_WAIT = "data_wait_seconds"
METRIC_CHECKPOINT_SECONDS = "checkpoint_seconds"  # seconds that steps were blocked by checkpoints
METRIC_REWARD_MARGIN = (
    "reward_margin"  # DPO, ORPO, SimPO, RewardModel; for KTO, the margin between the two means below
)
METRIC_REWARD_ACCURACY = "reward_accuracy"  # DPO, ORPO, SimPO, RewardModel
METRIC_REWARD_MEAN = "reward_mean"  # RewardModel: mean over all answers
METRIC_REWARD_DESIRABLE = "reward_desirable"  # KTO: mean over the good answers
METRIC_REWARD_UNDESIRABLE = "reward_undesirable"  # KTO: mean over the bad answers
METRIC_KL = "kl"  # KTO: the estimate of the divergence from the reference
METRIC_DIVERGENCE = "divergence"  # Distillation: the divergence from the teacher
EVAL_PREFIX = "eval_"  # before the name of a metric of the objective, on the validation split
_OBJECTIVE_METRICS = (
    METRIC_REWARD_MARGIN,
    METRIC_REWARD_ACCURACY,
    METRIC_REWARD_MEAN,
    METRIC_REWARD_DESIRABLE,
    METRIC_REWARD_UNDESIRABLE,
    METRIC_KL,
    METRIC_DIVERGENCE,
)

# Tags of the MLflow run and of the registered version. A comment begins with the writer of the tag; a tag whose comment names no place
# is on both. The tags of versions have no dot, hyphen or slash in their names: Unity Catalog does not allow . , - = / : in the key of a
# tag.
TAG_JOB_UID = "finetune.dev/uid"  # operator, on the run: the operator finds the run by this tag
TAG_JOB = "finetune.dev/job"  # operator, on the run: namespace/name
TAG_GATE_JOB = (
    "finetune.dev/gate-job"  # operator, on the run of a gate's Job: the operator finds the run by this tag
)
TAG_COPY_JOB = (
    "finetune.dev/copy-job"  # operator, on the run of a copy: the operator finds the run by this tag
)
TAG_PROMOTION = "finetune.dev/promotion"  # operator, on the run of a gate's Job or of a copy: namespace/name
TAG_JUDGED_MODEL = "finetune.dev/model"  # operator, on the run of a gate's Job: the registered model
TAG_JUDGED_VERSION = "finetune.dev/version"  # operator, on the run of a gate's Job: the version
TAG_PARENT_RUN = "mlflow.parentRunId"  # operator, on the runs of the trials of a sweep: MLflow shows them below the run of the sweep
TAG_NAMESPACE_UID = "finetune.dev/namespace-uid"  # operator, on the run: uid of the namespace of the job
TAG_ATTEMPT = "finetune.dev/attempt"  # trainer, on the run: the newest attempt
TAG_PREPARATION = (
    "finetune.dev/preparation"  # prep pod, on the run: the step and its percent, such as writing 40%
)
ARTIFACTS_EVALUATION = "evaluation"  # evaluation pod, on the run: folder of the table generations.json
ARTIFACTS_PREPARATION = "preparation"  # prep pod, on the run: folder of the report, with report.html
# operator, on the run, if trainer.code.git is set: MLflow defines these names
TAG_GIT_COMMIT = "mlflow.source.git.commit"
TAG_GIT_BRANCH = "mlflow.source.git.branch"
TAG_GIT_URL = "mlflow.source.git.repoURL"
TAG_DEVICE = "finetune.dev/device"  # trainer, on the run: GPU or CPU
TAG_DEVICE_NAME = (
    "finetune.dev/device-name"  # trainer, on the run: the model of the device, such as NVIDIA H100 80GB HBM3
)
TAG_PLAN = "finetune.dev/plan"  # trainer, on the run: MemoryPlan of the newest attempt, as JSON
TAG_RECIPE = "finetune_recipe"  # trainer: digest of the recipe
TAG_DATA_PATH = "finetune_data_path"  # trainer: the table with the splits
TAG_DATA_VERSION = (
    "finetune_data_version"  # trainer: the version of this table; of tables of splits, train=3,test=0
)
TAG_DATA_DIGEST = "finetune_data_digest"  # trainer: digest of the rows of this table, see status.data.digest
TAG_SOURCE = "finetune_source"  # trainer: the source that was prepared; for a mix, the list of its sources
TAG_SOURCE_VERSION = "finetune_source_version"  # trainer: version or commit of the source, if it has one
TAG_DATA_ROWS = "finetune_data_rows"  # trainer, on the run: rows of each split, as JSON
TAG_DATA_TOKENS = "finetune_data_tokens"  # trainer, on the run: tokens of each split, as JSON
TAG_DATA_DROPPED = "finetune_data_dropped"  # trainer, on the run: rows that each step dropped, as JSON
# trainer, on the run and on the version: evaluation losses with the same digest are comparable. Digest of the tokenized
# validation split, independent of the order of its examples; for any objective other than SFT, also of the objective and of its
# reference or teacher
TAG_EVAL_DATA = "finetune_eval_data"
# operator, on the version: numbers of spec.evaluation with the same digest are comparable, see status.evaluation.digest
TAG_EVALUATION_DATA = "finetune_evaluation_data"
# trainer, on the run: the error of the newest checkpoint; empty if it was written
TAG_CHECKPOINT_ERROR = "finetune.dev/checkpoint-error"
TAG_RESUMED_FROM = "finetune_resumed_from"  # trainer: the checkpoint of another job that the run started from
# trainer, if the training started from a version of the model that it registers: this version, whose numbers before the training are
# comparable with those after it
TAG_BASE_VERSION = "finetune_base_version"
# trainer, on a version that is a copy of a version of another registry: the digest of the source's version, by which the operator finds the
# copy; the address, the model, the version and the run of the source; the digest of the files
TAG_COPY = "finetune_copy"
TAG_COPIED_FROM, TAG_COPIED_MODEL = "finetune_copied_from", "finetune_copied_model"
TAG_COPIED_VERSION, TAG_COPIED_RUN = "finetune_copied_version", "finetune_copied_run"
TAG_COPIED_FILES = "finetune_copied_files"
TAG_EVAL_LOSS = "eval_loss"  # trainer, on the version
TAG_PERPLEXITY = "perplexity"  # trainer, on the version
# Metrics, and tags of the version, that only training writes: an evaluation must not use their names. METRIC_EVAL_LOSS and
# TAG_EVAL_LOSS are the same name.
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
        METRIC_PRODUCTIVE_SECONDS,
        METRIC_MFU,
        METRIC_MEMORY,
        METRIC_PLAN_MEMORY,
        METRIC_DATA_WAIT,
        METRIC_CHECKPOINT_SECONDS,
        *_OBJECTIVE_METRICS,
        *(f"{EVAL_PREFIX}{name}" for name in _OBJECTIVE_METRICS),
        TAG_EVAL_LOSS,
        TAG_PERPLEXITY,
    }
)


class PodError(ApiModel):
    """The error of a pod that failed."""

    reason: Annotated[str, Field(max_length=64)]
    """One CamelCase word, such as MissingColumn."""
    message: Annotated[str, Field(max_length=2048)]
    """One sentence: what happened and what to do."""
    rank: NonNegative | None = None
    """Global rank that failed first in this pod, if known."""


class PrepResult(ApiModel):
    """The result of the prep pod. Fields without a description are those of status.data."""

    rows: SplitCounts
    tokens: SplitCounts
    path: Uri
    version: NonNegative
    source_version: NonNegative | None = None
    source_revision: Commit | None = None
    feedback_version: NonNegative | None = None
    sources: list[SourceRows] | None = None
    dropped: dict[StepName, NonNegative] = Field(default_factory=dict)
    """Number of examples that each step dropped."""
    redacted: dict[RedactKind, NonNegative] | None = None
    """Number of values of each kind that were replaced by placeholders; None without data.prepare.redact."""
    warnings: list[str] | None = None
    """Warnings for the author of the job, one sentence each; None without warnings."""
    evaluation_sets: EvaluationSets | None = None
    columns: Columns | None = None
    """Columns of an example in the source: from the recipe, or detected."""
    digest: Digest | None = None
    """Digest of the preparation's settings and of the sources that it read."""
    written_by: Name | None = None
    """The other FineTuneJob that wrote this version of the table; None if this job wrote it."""


_INFORMATIONAL_FIELDS = ("evaluation_sets", "sources", "redacted", "dropped", "warnings")
"""Fields of PrepResult that are left out of a message that is too long, in this order."""


class TrainResult(ApiModel):
    """The result of the training, reported by rank 0. The fields are those of status.progress, status.model and status."""

    step: NonNegative
    base_eval_loss: float | None = None
    eval_loss: float | None = None
    perplexity: float | None = None
    model_name: str | None = None
    model_version: str | None = None
    goodput: float | None = None
    productive_seconds: float | None = None


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class MemoryPlan(ApiModel):
    """The memory plan that the built-in trainer makes before it loads the weights; the content of the tag TAG_PLAN."""

    activation_checkpointing: Recomputation
    memory_bytes: _Count
    """Estimated peak memory of a rank."""
    limit_bytes: _Count | None = None
    """Memory that a rank can use; None if unknown."""
    staged_bytes: _Count = 0
    """Host memory of a rank for the copy from which asynchronous checkpoints are written."""
    parameters: _Count
    trained_parameters: _Count
    four_bit_parameters: _Count | None = None
    """Parameters that QLoRA stores in four bits; None with another method."""
    parts: dict[str, _Count] = Field(default_factory=dict)
    """Bytes of the estimated peak by purpose."""

    @classmethod
    def parse(cls, text: str) -> MemoryPlan | None:
        """Parse the text of the tag; None if it is not a plan."""
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
        """Return the message as JSON within the size limit of Kubernetes.

        In a message that is too long, the result of a preparation loses informational fields, one after the other, or an error gets a
        shorter text. Any other message is returned as it is.
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
        # NB: a character takes up to six bytes of JSON, so the message is shortened until it fits.
        shorter = self.error.message[: len(self.error.message) * 3 // 4]
        error = self.error.model_copy(update={"message": shorter})
        return self.model_copy(update={"error": error}).dump()

    @classmethod
    def parse(cls, text: str | None) -> TerminationMessage | None:
        """Parse a termination message; None if the text is something else, such as the end of a log."""
        try:
            message = cls.model_validate_json(text or "")
        except ValueError:
            return None
        # All fields are optional and unknown fields are ignored, so any JSON object is valid.
        return message if message.model_fields_set else None


class RunReport(ApiModel):
    """The exit code and the termination message that a pod would have, in a file.

    A preparation on Databricks writes it to the volume, and the container of the upload to UPLOAD_PATH if it fails.
    """

    exit_code: NonNegative
    message: TerminationMessage = Field(default_factory=TerminationMessage)

    @classmethod
    def parse(cls, text: bytes) -> RunReport | None:
        """Parse a report file; None if its content is something else, such as a partly written report."""
        try:
            return cls.model_validate_json(text)
        except ValueError:
            return None


def job_folder(uri: str, *, namespace: str, name: str, uid: str) -> str:
    """Return the folder of a job below a URI that jobs share. A later job of the same name gets another folder."""
    return f"{uri.rstrip('/')}/{namespace}-{name}-{uid[:8]}"


def split_checkpoint_uri(uri: str) -> tuple[str, int | None]:
    """Split a URI of checkpoints into the job's folder and the step. The step is None if the URI names the folder."""
    match = _CHECKPOINT.fullmatch(uri.rstrip("/"))
    return (match[1], int(match[2])) if match else (uri.rstrip("/"), None)


def checkpoint_uri(folder: str, step: int) -> str:
    """Return the URI of the checkpoint of a step."""
    return f"{folder}/step-{step:08d}"
